"""The environment and the socket of a node's watcher."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

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
    assert not tell_watcher(progress=3)
    monkeypatch.setenv("HPCSTRAT_WATCH_SOCKET", path)
    # A watcher that has ended is no error.
    assert not tell_watcher(progress=3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        assert tell_watcher(progress=3)
        line, _ = server.accept()
        with line:
            assert json.loads(line.makefile().readline()) == {"progress": 3}
