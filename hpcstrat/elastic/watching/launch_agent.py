"""Replaces ssh for mpirun: has a command started by the watcher of another node.

``python -m hpcstrat.elastic.watching.launch_agent HOST COMMAND...``
"""

from __future__ import annotations

import getopt
import os
import shlex
import socket
import sys
from pathlib import Path

from hpcstrat.elastic.watching.mesh import Identity, greet
from hpcstrat.elastic.watching.watch_messages import (
    MalformedMessageError,
    MessageStream,
)
from hpcstrat.elastic.watching.watch_secret import SecretError, shared_secret

__all__ = ["AGENT", "main"]

AGENT = f"{sys.executable} -m hpcstrat.elastic.watching.launch_agent"
"""The command that mpirun and MPICH's hydra call instead of ssh."""

_SECONDS = 10.0
# Options of ssh, which hydra passes, and mpirun for the parameter plm_ssh_args.
_OPTIONS = "46AaCfGgKkMNnqsTtVvXxYyB:b:c:D:E:e:F:I:i:J:L:l:m:O:o:p:Q:R:S:W:w:"


def main() -> int:
    """Have a command started; its output and its exit status become this one's."""
    host, *words = getopt.getopt(sys.argv[1:], _OPTIONS)[1]
    try:
        folder = Path(os.environ["HPCSTRAT_WATCH_FOLDER"])
        number = int(os.environ["HPCSTRAT_WATCH_GENERATION"])
        job, port = os.environ["HPCSTRAT_WATCH_JOB"], os.environ["HPCSTRAT_WATCH_PORT"]
        own = Identity(shared_secret(folder), job, os.uname().nodename)
        connection = socket.create_connection((host, int(port)), timeout=_SECONDS)
        stream = MessageStream(connection)
        greet(own, stream, "command")
        # As with ssh, the words are joined to one line for the remote shell. hydra does
        # not quote the name of its launcher, which is in the run's folder.
        first, *more = words
        quoted = (w if w.startswith('"') else shlex.quote(w) for w in more)
        line = " ".join([first, *quoted])
        stream.send("command", number=number, line=line)
        connection.settimeout(None)
        # The last byte is the command's exit status. mpirun would wait forever for a
        # daemon that has failed with status 0.
        held = b""
        while data := connection.recv(1 << 16):
            sys.stdout.buffer.write(held + data[:-1])
            sys.stdout.buffer.flush()
            held = data[-1:]
    except (OSError, SecretError, MalformedMessageError) as error:
        sys.stderr.write(f"hpcstrat watch: no command on {host}: {error}\n")
        return 1
    return held[0] if held else 1


if __name__ == "__main__":
    sys.exit(main())
