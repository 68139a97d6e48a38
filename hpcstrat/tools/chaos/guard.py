"""A process that continues stopped ranks if the process that stopped them is gone.

It reads ``+N`` and ``-N`` from standard input, when the rank of pidfd N is stopped and
continued; at the end of the input it continues those that are still stopped. Run as a
file, without the package.
"""

from __future__ import annotations

import contextlib
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Wait for the end of standard input."""
    stopped = set()
    for line in sys.stdin:
        number = int(line[1:])
        if line[0] == "+":
            stopped.add(number)
        else:
            stopped.discard(number)
    # The input ends with the process that writes it, in whatever way that ends.
    for number in stopped:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(number, signal.SIGCONT)


if __name__ == "__main__":
    main()
