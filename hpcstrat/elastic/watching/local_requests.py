"""This node's folder of a run, and requests of its processes over a Unix socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpcstrat.elastic.watching.child_start import FOLDERS, node_folder
from hpcstrat.elastic.watching.watch_messages import (
    FROM_RANK,
    MalformedMessageError,
    MessageStream,
)

__all__ = ["make_node_folder", "take_requests"]

_RETRY_SECONDS = 0.1


def make_node_folder(run: str, node: str) -> Path:
    """Make this node's folder of a run in /dev/shm, and lock it for this process.

    Folders of other runs of this user are removed, unless a watcher holds their lock.
    Raises OSError if /dev/shm cannot be used.
    """
    made = Path(node_folder(run, node))
    for path in Path("/").glob(f"{FOLDERS[1:]}{os.geteuid()}-*"):
        about = path.lstat()
        is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
        if is_own and _lock(path):
            shutil.rmtree(path, ignore_errors=True)
    made.mkdir(mode=0o700, exist_ok=True)
    if not _lock(made):
        raise FileExistsError(
            f"expected one watcher of this run on {node}, found another one, which has "
            f"{made}; start one on each node"
        )
    (made / "memory").mkdir(mode=0o700)
    return made


def _lock(path: Path) -> bool:
    """Lock a folder until the end of this process; return whether nobody else has."""
    file = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    return True


def take_requests(path: Path, deliver: Callable[..., None]) -> None:
    """Take requests of this user's processes, in a thread for each connection.

    ``deliver`` is called with ``local``, the sender's process id, a message and the
    `MessageStream` for an answer; with ``left`` and the process id at the end of the
    connection; with ``log`` and a text.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(512)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                # There are too many open files.
                time.sleep(_RETRY_SECONDS)
            else:
                threading.Thread(target=take, args=(connection,), daemon=True).start()

    def take(connection: socket.socket) -> None:
        about = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, user, _ = struct.unpack("3i", about)
        stream = MessageStream(connection)
        with connection, contextlib.suppress(OSError):
            try:
                while user == os.geteuid() and (message := stream.receive(FROM_RANK)):
                    deliver("local", pid, message, stream)
            except MalformedMessageError as error:
                deliver("log", f"a request of process {pid} is refused: {error}")
                stream.send("refused", reason=str(error))
        deliver("left", pid)

    threading.Thread(target=accept, daemon=True).start()
