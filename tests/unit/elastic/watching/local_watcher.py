"""A watcher of this machine only, for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcstrat.elastic.watching.watch_secret import run_name, shared_secret
from hpcstrat.testing import launch_command
from hpcstrat.testing.launcher import clean_environment

HPCSTRAT = str(Path(sys.executable).with_name("hpcstrat"))
SECONDS = 60

open_mpi = pytest.mark.skipif(
    "--oversubscribe" not in launch_command(1),
    reason="the options of mpirun are those of Open MPI",
)


def environment() -> dict[str, str]:
    env = clean_environment()
    path = f"{Path(sys.executable).parent}:{env['PATH']}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**env, **root, "PATH": path}


@contextlib.contextmanager
def watched(
    folder: Path, program: str, *options: str, job: str = "test"
) -> Iterator[subprocess.Popen[str]]:
    """Yield a watcher of this machine only, which runs a program of Python."""
    name = socket.gethostname()
    words = [HPCSTRAT, "watch", "--nodes", name, "--job", job, "--folder", str(folder)]
    words += ["--launcher", "mpirun", *options, "--", sys.executable, "-c", program]
    with subprocess.Popen(
        words,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as watcher:
        try:
            yield watcher
        finally:
            watcher.kill()


def result(folder: Path, program: str, *options: str) -> tuple[int, str]:
    """Return exit status and log of a watcher."""
    with watched(folder, program, *options) as watcher:
        said = watcher.communicate(timeout=SECONDS)[1]
        assert not list(Path("/dev/shm").glob(f"*{own_run(folder)}*"))
        return watcher.returncode, said


def own_run(folder: Path) -> str:
    return run_name(shared_secret(folder / "watch"))


def wait_for(path: Path) -> str:
    """Return the text of a file as soon as it has some."""
    until = time.monotonic() + SECONDS
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    return path.read_text()
