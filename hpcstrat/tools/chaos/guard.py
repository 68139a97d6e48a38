"""A guard process, which continues stopped ranks if the process that stopped them ends.

It reads lines from standard input: ``+N`` before the rank of pidfd N is stopped, and
``-N`` after the rank continues. At the end of the input it continues the ranks that are
still stopped. Python runs this file alone, without importing the package.
"""

from __future__ import annotations

import contextlib
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Read standard input to its end, then continue the ranks that are stopped."""
    stopped = set()
    for line in sys.stdin:
        number = int(line[1:])
        if line[0] == "+":
            stopped.add(number)
        else:
            stopped.discard(number)
    # The input ends when the process that writes it ends, even if it was killed.
    for number in stopped:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(number, signal.SIGCONT)


if __name__ == "__main__":
    main()
