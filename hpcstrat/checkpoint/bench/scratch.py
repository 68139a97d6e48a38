"""A folder that is removed at the end, also when the process is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator

__all__ = ["scratch"]

# Reads until this process closes its end of the pipe, or has died.
_GUARD = 'trap "" HUP INT TERM; cat > /dev/null; rm -rf -- "$0"'


@contextlib.contextmanager
def scratch(directory: str) -> Iterator[str]:
    """Choose a name for a folder; whatever it is at the end is removed.

    One rank calls it, before MPI starts, because it starts a process. That process
    removes the folder, so that it is done however this one ends. Yields the absolute
    path of the folder, which is still to be made; ``directory`` need not exist.
    """
    name = f".hpcstrat-bench-{secrets.token_hex(8)}"
    folder = os.path.join(os.path.abspath(directory), name)
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Neither an interrupt nor a launcher that kills its ranks ends it.
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        guard.communicate()
