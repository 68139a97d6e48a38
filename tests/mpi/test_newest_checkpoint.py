"""A job that ends early says once which checkpoint is the newest, and where it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcstrat.engine import native
from tests.docs.said import assert_said
from tests.mpi.programs.started import Ended, start

pytestmark = pytest.mark.skipif(
    native.load_last_line() is None, reason="built without the module last_line"
)


def _ended(folder: Path, n: int, how: str) -> Ended:
    return start(n, "save_and_end.py", folder, how, limit=60)


def _line(folder: Path) -> str:
    return f"hpcstrat: the newest checkpoint is ckpt-0000000003.h5 in {folder}\n"


def test_newest_checkpoint_is_said_once_when_a_job_ends_early(tmp_path: Path) -> None:
    cases = [(2, "kill0"), (2, "error1"), (2, "interrupt"), (1, "interrupt")]
    folders = [tmp_path / f"{n}-{how}" for n, how in cases]
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda f, c: _ended(f, *c), folders, cases))
    for folder, ended in zip(folders, ends, strict=True):
        assert ended.returncode, ended
        assert not ended.survivors, ended
        assert ended.stderr.count(_line(folder)) == 1, ended
        assert ended.stderr.count("newest checkpoint") == 1, ended
        assert_said("newest-checkpoint", ended.stderr)
        # Lines of ours and of the program come before it.
        after = ended.stderr.rpartition(_line(folder))[2]
        assert "Error" not in after, ended
        assert "ends the job" not in after, ended
    # In the next job, the restored checkpoint is the newest.
    ended = _ended(folders[0], 2, "restored")
    assert ended.stderr.count(_line(folders[0])) == 1, ended


def test_good_end_and_end_of_a_child_say_nothing(tmp_path: Path) -> None:
    ended = _ended(tmp_path, 2, "child")
    assert ended.returncode == 0, ended
    assert ended.stdout.count("ended") == 2, ended
    assert "newest checkpoint" not in ended.stderr, ended
