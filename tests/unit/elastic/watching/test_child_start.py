"""The process that starts a rank, beside a watcher that accepts it."""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcstrat.elastic.watching import child_start
from hpcstrat.elastic.watching.local_requests import make_node_folder

SECONDS = 20


class AcceptedRank:
    """A program that was started as a rank, and its connection with the watcher."""

    def __init__(self, folder: Path, program: str, **variables: str) -> None:
        run, node = secrets.token_hex(8), os.uname().nodename
        self.folder = make_node_folder(run, node)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / "socket"))
        listener.listen()
        listener.settimeout(SECONDS)
        watch = {"HPCSTRAT_WATCH_RUN": run, "HPCSTRAT_WATCH_GENERATION": "1"}
        words = [sys.executable, "-I", "-S", child_start.__file__, "rank"]
        self.process = subprocess.Popen(
            [*words, sys.executable, "-c", program],
            env={**os.environ, **watch, **variables},
            stdout=subprocess.PIPE,
            cwd=folder,
            text=True,
        )
        with listener:
            self.watcher, _ = listener.accept()
        assert self.told() == {"kind": "rank", "number": 1}
        self.watcher.sendall(b'{"kind": "accepted", "node": "first"}\n')

    def told(self) -> Any:
        """Return the next message to the watcher."""
        self.watcher.settimeout(SECONDS)
        return json.loads(self.watcher.recv(1 << 16))

    def close(self) -> None:
        """End the process, and remove its folder."""
        self.watcher.close()
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder)


@pytest.fixture
def ranks() -> Iterator[list[AcceptedRank]]:
    """Yield a list of ranks, which end with the test."""
    made: list[AcceptedRank] = []
    yield made
    for rank in made:
        rank.close()


def test_a_rank_ends_with_its_watcher(
    tmp_path: Path, ranks: list[AcceptedRank]
) -> None:
    """Its launcher may live on: a daemon of mpirun is connected with mpirun only."""
    program = "import time; print('begun', flush=True); time.sleep(60)"
    ranks.append(rank := AcceptedRank(tmp_path, program))
    assert rank.process.stdout is not None
    assert rank.process.stdout.readline() == "begun\n"
    rank.watcher.close()
    # The rank has the other end of the pipe.
    assert not rank.process.communicate(timeout=SECONDS)[0]
    assert rank.process.returncode == -signal.SIGIO


def test_the_status_of_a_rank_reaches_a_watcher_that_ends(
    tmp_path: Path, ranks: list[AcceptedRank]
) -> None:
    ranks.append(rank := AcceptedRank(tmp_path, "raise SystemExit(5)"))
    assert rank.told() == {"kind": "rank_end", "number": 1, "status": 5}
    rank.watcher.close()
    assert rank.process.wait(SECONDS) == 5


@pytest.mark.parametrize("before", ["/somewhere", ""])
def test_a_rank_has_the_users_folder_of_temporary_files(
    tmp_path: Path, ranks: list[AcceptedRank], before: str
) -> None:
    program = "import os; print(os.environ.get('TMPDIR', ''))"
    own = child_start.with_own_files({"TMPDIR": before}, str(tmp_path / "own"))
    assert own["TMPDIR"] == str(tmp_path / "own")
    ranks.append(rank := AcceptedRank(tmp_path, program, **own))
    assert rank.process.communicate(timeout=SECONDS)[0] == f"{before}\n"


@pytest.mark.skipif(
    Path("/proc/sys/kernel/core_pattern").read_text() != "core\n",
    reason="core files are not in the folder of the process",
)
def test_the_core_file_is_that_of_the_rank(
    tmp_path: Path, ranks: list[AcceptedRank]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        program = "import os; os.kill(os.getpid(), 11)"
        ranks.append(rank := AcceptedRank(tmp_path, program))
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert rank.process.wait(SECONDS) == -signal.SIGSEGV
    [core] = tmp_path.glob("core*")
    # This is the name of a function of the process that has started the rank.
    assert b"_run_rank" not in core.read_bytes()
