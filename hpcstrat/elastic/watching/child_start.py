"""Starts a program that ends with its parent process; runs isolated, without packages.

``python -I -S child_start.py rank PROGRAM...`` starts a rank: it registers the process
with the watcher of this node, which refuses it if its generation is over.
``python -I -S child_start.py child PARENT NICE PROGRAM...`` starts a launcher, a daemon
of mpirun or a program beside the ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_SECONDS = 20.0


def node_folder(run: str, node: str) -> str:
    """Return this node's own folder of a run, in memory."""
    # A name of any length becomes 8 characters, because a Unix socket's path is limited
    # to 107; FNV-1a, because an import of hashlib takes longer than all of this.
    number = 2166136261
    for byte in node.encode():
        number = (number ^ byte) * 16777619 & 0xFFFFFFFF
    return f"/dev/shm/hpcstrat-watch-{os.geteuid()}-{run}-{number:08x}"


def node_variables(run: str, node: str) -> dict[str, str]:
    """Return the environment variables that differ between nodes."""
    folder = node_folder(run, node)
    return {
        "HPCSTRAT_WATCH_MEMORY": f"{folder}/memory",
        "HPCSTRAT_WATCH_SOCKET": f"{folder}/socket",
    }


def ask(
    path: str, message: dict[str, object], *, answered: bool = True
) -> dict[str, object]:
    """Send a message to the watcher of this node, and return its answer, if any."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(path)
        connection.sendall(json.dumps(message).encode() + b"\n")
        if not answered:
            return {}
        with connection.makefile("rb") as stream:
            answer = json.loads(stream.readline(1 << 16) or b"{}")
    return answer if isinstance(answer, dict) else {}


def _register() -> None:
    run, node = os.environ["HPCSTRAT_WATCH_RUN"], os.uname().nodename
    os.environ.update(node_variables(run, node))
    number = int(os.environ["HPCSTRAT_WATCH_GENERATION"])
    try:
        path = os.environ["HPCSTRAT_WATCH_SOCKET"]
        answer = ask(path, {"kind": "rank", "number": number})
    except (OSError, ValueError) as error:
        answer = {"refused": f"expected a watcher on node {node}, found none ({error})"}
    if "refused" in answer or "accepted" not in answer:
        refusal = answer.get("refused", "the watcher has ended")
        sys.exit(f"hpcstrat watch: {refusal}; this rank is not started")


def main() -> None:
    """Start the program of the command line in place of this process."""
    kind, *words = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if kind == "rank":
        _register()
    else:
        parent, nice, *words = words
        # The parent may have ended before the line above.
        if os.getppid() != int(parent):
            sys.exit(1)
        os.nice(int(nice))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"hpcstrat watch: cannot start {words[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
