"""Memory of every size around what snapshots need: never SIGBUS, never a lost run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.saved import warnings_of_checkpoints

_WEIGHTS = 1 << 18
_NEEDED_KIB = 2 * (_WEIGHTS * 8 // 1024 + 4) + 1024


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "memory"
    path.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "mode=700,size=1m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mounting, check=False).returncode:
        pytest.skip("only root can mount a file system of a given size")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_memory_of_each_size_is_used_or_refused(
    mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCSTRAT_WATCH_MEMORY", str(mount))
    used = []
    for kib in range(_NEEDED_KIB - 48, _NEEDED_KIB + 64, 8):
        subprocess.run(["mount", "-o", f"remount,size={kib}k", str(mount)], check=True)
        weights = hs.Variable(np.zeros(_WEIGHTS))
        options = hs.CheckpointOptions(memory=1, every=10**6)
        folder = tmp_path / str(kib)
        with warnings_of_checkpoints() as said:
            manager = hs.CheckpointManager(folder, options=options, w=weights)
            for step in (1, 2, 3):
                weights.assign(np.full(_WEIGHTS, float(step)))
                manager.save_if_due(step)
            manager.wait()
        again = hs.CheckpointManager(folder, options=options, w=weights)
        # Without snapshots, the first save is restored from the disk.
        assert again.restore() == (1 if said else 3)
        assert (weights.component == (1 if said else 3)).all()
        used.append(not said)
        if said:
            assert len(said) == 1
            assert "needs 5 MiB, of which" in said[0]
        again.complete()
    assert used == sorted(used)
    assert used[0] is False
    assert used[-1] is True
