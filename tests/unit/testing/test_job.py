"""Launchers that do not exit by themselves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpcstrat.testing import job


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(job, "_ALONE_SECONDS", 0.5)


def _started(script: str, folder: Path) -> job.Job:
    return job.Job(["sh", "-c", script], folder, dict(os.environ))


@pytest.mark.usefixtures("quick")
def test_a_launcher_that_stays_alone_is_ended(tmp_path: Path) -> None:
    # A shell that stops itself, as mpirun sometimes hangs.
    alone = _started("sleep 0.5; kill -STOP $$", tmp_path)
    try:
        assert alone.wait(30) == -signal.SIGKILL
        assert "expected the launcher to end after its processes" in alone.stderr
    finally:
        alone.end()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("script", ["kill -STOP $$", "sleep 60; true"])
def test_others_are_waited_for(script: str, tmp_path: Path) -> None:
    """A launcher without processes yet, and one whose process still runs."""
    started = _started(script, tmp_path)
    try:
        assert started.wait(1.5) is None
        assert not started.stderr
    finally:
        started.end()
