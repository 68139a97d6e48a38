"""The environment and the socket of a node's watcher."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint.keep.watcher_contract import (
    require_newest_generation,
    tell_watcher,
)
from hpcstrat.errors import CheckpointError


def test_newest_generation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_newest_generation("a save")
    monkeypatch.setenv("HPCSTRAT_WATCH_FOLDER", str(tmp_path))
    monkeypatch.setenv("HPCSTRAT_WATCH_GENERATION", "9")
    for number in range(1, 10):
        (tmp_path / f"gen-{number}").touch()
    require_newest_generation("a save")
    for number in (10, 11):
        (tmp_path / f"gen-{number}").touch()
    with pytest.raises(CheckpointError, match=r"generation 9 .* generation 11"):
        require_newest_generation("a save")


def test_messages_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "socket")
    assert not tell_watcher("progress", step=3)
    monkeypatch.setenv("HPCSTRAT_WATCH_SOCKET", path)
    # A watcher that has ended is no error.
    assert not tell_watcher("progress", step=3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        assert tell_watcher("progress", step=3)
        line, _ = server.accept()
        with line:
            told = json.loads(line.makefile().readline())
            assert told == {"kind": "progress", "step": 3}


@pytest.mark.parametrize("memory", [False, 1])
def test_saves_and_snapshots_tell_their_steps(
    memory: bool | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "socket")
    monkeypatch.setenv("HPCSTRAT_WATCH_SOCKET", path)
    monkeypatch.setenv("HPCSTRAT_WATCH_MEMORY", str(tmp_path))
    options = hs.CheckpointOptions(memory=memory, every=2)
    weights = hs.Variable(np.zeros(3))
    told = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        server.setblocking(False)
        manager = hs.CheckpointManager(tmp_path / "c", options=options, w=weights)
        for step in (1, 2, 3, 4):
            manager.save_if_due(step)
        manager.complete()
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = server.accept()
                with line:
                    told.append(json.loads(line.makefile().readline())["step"])
    assert told == ([1, 2, 3, 4] if memory else [1, 3])
