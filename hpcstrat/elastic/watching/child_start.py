"""Starts a program that ends with its parent process; runs isolated, without packages.

``python -I -S child_start.py rank PROGRAM...`` starts a rank, registers it with the
watcher of this node, which refuses it if its generation is over, and reports its exit
status: that of mpirun is 0 even after the loss of a node.
``python -I -S child_start.py child PARENT NICE PROGRAM...`` starts a launcher, a daemon
of mpirun, or the process that writes snapshots.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping

FOLDERS = "/dev/shm/hpcstrat-watch-"
MPI_FOLDERS = "mpi-"
"""Folders of Open MPI's files, one for each generation, in a node's folder."""

_MPI_FOLDER = "OMPI_MCA_btl_sm_backing_directory"
_USERS_TMPDIR = "HPCSTRAT_WATCH_TMPDIR"

_PR_SET_PDEATHSIG = 1
_SECONDS = 20.0
_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
)


def node_folder(run: str, node: str) -> str:
    """Return this node's own folder of a run, in memory."""
    # A name of any length becomes 8 characters, because a Unix socket's path is limited
    # to 107; FNV-1a, because an import of hashlib takes longer than all of this.
    number = 2166136261
    for byte in node.encode():
        number = (number ^ byte) * 16777619 & 0xFFFFFFFF
    return f"{FOLDERS}{os.geteuid()}-{run}-{number:08x}"


def node_variables(run: str, node: str) -> dict[str, str]:
    """Return the environment variables that differ between nodes."""
    folder = node_folder(run, node)
    return {
        "HPCSTRAT_WATCH_MEMORY": f"{folder}/memory",
        "HPCSTRAT_WATCH_SOCKET": f"{folder}/socket",
    }


def with_own_files(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return a launcher's environment in which its session directory is in a folder.

    A killed process of mpirun leaves its session directory behind, and another one with
    the same process number fails in it.
    """
    kept = {name: env[name] for name in env if not name.endswith("_tmpdir_base")}
    os.makedirs(folder, 0o700, exist_ok=True)
    return {**kept, "TMPDIR": folder, _USERS_TMPDIR: env.get("TMPDIR", "")}


def tell(watcher: socket.socket, kind: str, **fields: object) -> None:
    """Send a message to the watcher of this node."""
    watcher.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")


def _register(watcher: socket.socket, number: int) -> dict[str, str]:
    """Register a rank of a generation, and return the watcher's answer."""
    try:
        watcher.settimeout(_SECONDS)
        watcher.connect(os.environ["HPCSTRAT_WATCH_SOCKET"])
        tell(watcher, "rank", number=number)
        with watcher.makefile("rb") as stream:
            answer: dict[str, str] = json.loads(stream.readline(1 << 16))
        # At the end of the watcher, the kernel ends this process by SIGIO.
        fcntl.fcntl(watcher, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(watcher, fcntl.F_SETFL, os.O_ASYNC)
        return answer
    except (OSError, ValueError) as error:
        node = os.uname().nodename
        reason = f"expected a watcher on node {node}, found none ({error})"
        return {"kind": "refused", "reason": reason}


def _run_rank(words: list[str]) -> int:
    """Run a rank as a child process, and tell the watcher its exit status.

    The connection with the watcher lasts as long as this process.
    """
    run, node = os.environ["HPCSTRAT_WATCH_RUN"], os.uname().nodename
    number = int(os.environ["HPCSTRAT_WATCH_GENERATION"])
    os.environ.update(node_variables(run, node))
    watcher = socket.socket(socket.AF_UNIX)
    answer = _register(watcher, number)
    if answer["kind"] == "refused":
        sys.exit(f"hpcstrat watch: {answer['reason']}; this rank is not started")
    os.environ["HPCSTRAT_WATCH_NODE"] = answer["node"]
    # The launcher has a TMPDIR of its own, if a watcher has started it on this node.
    os.environ["TMPDIR"] = os.environ.pop(_USERS_TMPDIR, os.environ.get("TMPDIR", ""))
    if not os.environ["TMPDIR"]:
        del os.environ["TMPDIR"]
    # Killed ranks leave their shared memory behind, which the watcher removes.
    shared = f"{node_folder(run, node)}/{MPI_FOLDERS}{number}"
    os.makedirs(shared, 0o700, exist_ok=True)
    os.environ.setdefault(_MPI_FOLDER, shared)
    # Launchers send signals to the group of a rank's processes.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    own = os.getpid()
    rank = os.fork()
    if rank == 0:
        for one, handler in before.items():
            is_ignored = handler == signal.SIG_IGN
            signal.signal(one, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
        _end_with(own)
        _execute(words)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        told = status if status >= 0 else 128 - status
        tell(watcher, "rank_end", number=number, status=told)
    if status < 0:
        # The launcher sees the signal that has ended the rank, whose core file stays.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(own, -status)
    return abs(status)


def _end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the line above.
    if os.getppid() != parent:
        os._exit(1)


def _execute(words: list[str]) -> None:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.stderr.write(f"hpcstrat watch: cannot start {words[0]}: {error.strerror}\n")
        os._exit(127)


def main() -> int:
    """Start the program of the command line."""
    kind, *words = sys.argv[1:]
    if kind == "rank":
        _end_with(os.getppid())
        return _run_rank(words)
    parent, nice, *words = words
    _end_with(int(parent))
    os.nice(int(nice))
    _execute(words)
    return 1


if __name__ == "__main__":
    sys.exit(main())
