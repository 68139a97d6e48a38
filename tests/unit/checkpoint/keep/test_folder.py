"""Temporary files in a folder of checkpoints: their owners, and their removal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint import disk
from hpcstrat.checkpoint.keep import folder
from hpcstrat.checkpoint.save import part_writer
from hpcstrat.testing.launcher import clean_environment
from tests.folders import listed

_SAVE = """
import sys
import hpcstrat as hs
manager = hs.CheckpointManager(sys.argv[1], x=hs.Variable(1.0))
try:
    manager.save(2)
except hs.CheckpointError as error:
    print(error)
"""


def _unshare() -> list[str]:
    """Return a command prefix that runs a program in a separate PID namespace."""
    words = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which(words[0]) is None:
        pytest.skip("there is no unshare(1)")
    tried = subprocess.run([*words, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.decode().strip()}")
    return words


@pytest.mark.parametrize("shows_proc", [True, False])
def test_manager_in_a_container_leaves_files_of_living_jobs(
    shows_proc: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = _unshare()[: 4 if shows_proc else 3]
    goes_on, write = threading.Event(), part_writer.write_all

    def late(*args: Any) -> None:
        goes_on.wait(100)
        write(*args)

    monkeypatch.setattr(part_writer, "write_all", late)
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(np.ones(1000)))
    manager.save(1, asynchronous=True)
    [name] = listed(tmp_path)
    temporary = tmp_path / name
    paths = filter(
        None, [str(Path(hs.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    )
    try:
        ended = subprocess.run(
            [*words, sys.executable, "-c", _SAVE, str(tmp_path)],
            env=clean_environment({"PYTHONPATH": os.pathsep.join(filter(None, paths))}),
            check=True,
            timeout=100,
            capture_output=True,
            text=True,
        )
        assert temporary.exists()
        assert "found another job (process" in ended.stdout
    finally:
        goes_on.set()
    manager.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-0000000001.h5"]


def test_own_files_are_known_among_those_of_other_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = 999_999_999
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: dead)
        own = folder.temporary_name("ckpt-0000000001.h5")
        patch.setattr(os, "readlink", lambda _: "pid:[1]")
        other = folder.temporary_name("ckpt-0000000001.h5")
    for name in (own, other):
        (tmp_path / name).touch()
    folder.remove_abandoned(str(tmp_path))
    assert os.listdir(tmp_path) == [other]


@pytest.mark.parametrize(("days", "stays"), [(6, True), (8, False)])
def test_files_of_others_go_after_a_week(
    days: int, stays: bool, tmp_path: Path
) -> None:
    path = tmp_path / ".ckpt-0000000001.h5.0.elsewhere-abc-1.0123abcd"
    path.touch()
    then = path.stat().st_mtime - days * 86400
    os.utime(path, (then, then))
    mine = tmp_path / folder.temporary_name("ckpt-0000000002.h5")
    mine.touch()
    os.utime(mine, (then, then))
    folder.remove_abandoned(str(tmp_path))
    assert path.exists() == stays
    assert mine.exists()


def test_failing_close_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.close, os.open
    names: dict[int, str] = {}

    def remember(path: Any, *args: Any, **options: Any) -> int:
        file = opened(path, *args, **options)
        names[file] = os.fspath(path)
        return file

    def fail(file: int) -> None:
        real(file)
        if "/.ckpt-" in names.pop(file, ""):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "open", remember)
        patch.setattr(disk.os, "close", fail)
        with pytest.raises(hs.CheckpointError, match="Disk quota exceeded"):
            manager.save(1)
    assert listed(tmp_path) == []
    manager.save(1)
