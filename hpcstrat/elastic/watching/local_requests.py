"""Requests of processes of this node to their watcher, over a Unix socket."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcstrat.elastic.watching.child_start import FOLDERS, node_folder
from hpcstrat.elastic.watching.watch_messages import (
    FROM_RANK,
    LineBuffer,
    MalformedMessageError,
    check_message,
    normalized,
)

__all__ = ["LocalRequests", "NodeFolder"]

_SECONDS = 2.0
_ANSWER_SECONDS = 15.0


class NodeFolder:
    """This node's folder of a run in /dev/shm, with the lock of its watcher.

    Folders of other runs of this user are removed, unless a watcher holds their lock.
    Raises OSError if /dev/shm cannot be used.
    """

    def __init__(self, run: str, node: str) -> None:
        self.path = Path(node_folder(run, node))
        for path in Path("/").glob(f"{FOLDERS[1:]}{os.geteuid()}-*"):
            about = path.lstat()
            is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if is_own and self._lock(path) is not None:
                shutil.rmtree(path, ignore_errors=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self._lock(self.path) is None:
            raise FileExistsError(
                f"expected one watcher of this run on {node}, found another one, which "
                f"has {self.path}; start one on each node"
            )
        (self.path / "memory").mkdir(mode=0o700)

    def __repr__(self) -> str:
        return f"NodeFolder({str(self.path)!r})"

    def _lock(self, path: Path) -> int | None:
        """Lock a folder until the end of this process; None if another one has it."""
        file = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


class LocalRequests:
    """Receives the requests; a thread serves one connection after the other.

    ``deliver`` is called with ``local``, the sender's process id, the message, and a
    function that takes the answer.
    """

    def __init__(self, path: Path, deliver: Callable[..., None]) -> None:
        self._deliver = deliver
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(512)
        threading.Thread(target=self._serve, daemon=True).start()

    def __repr__(self) -> str:
        return f"LocalRequests({self._listener.getsockname()!r})"

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError, queue.Empty):
                connection.settimeout(_SECONDS)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("3i", packed)
        if user != os.geteuid():
            return
        lines = LineBuffer()
        while data := connection.recv(1 << 16):
            try:
                for message in lines.feed(data):
                    self._reply(connection, pid, normalized(message))
            except MalformedMessageError as error:
                self._deliver("log", f"a request of process {pid} is refused: {error}")
                connection.sendall(json.dumps({"refused": str(error)}).encode() + b"\n")
                return

    def _reply(
        self, connection: socket.socket, pid: int, message: dict[str, Any]
    ) -> None:
        kind = check_message(message, FROM_RANK)
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._deliver("local", pid, message, answers.put)
        if kind in ("rank", "rank_end"):
            answer = answers.get(timeout=_ANSWER_SECONDS)
            connection.sendall(json.dumps(answer).encode() + b"\n")
