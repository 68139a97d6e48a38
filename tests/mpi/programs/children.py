"""Make a strategy in a child of each rank: ``children.py spawn|fork|forkserver|raw``.

Run with ``later``, MPI has not started yet when the children do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

import hpcstrat as hs


def make(say: int) -> None:
    """Try to make a strategy, and write what it said."""
    try:
        hs.MirroredStrategy()
        text = "made"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    os.write(say, f"child: {text}\n".encode())


def main() -> None:
    """Start the child, wait for it, then reduce."""
    how, later = sys.argv[1], "later" in sys.argv[2:]
    if not later:
        strategy = hs.MirroredStrategy()
    if how == "raw":
        child = os.fork()
        if child == 0:
            make(1)
            os._exit(0)
        os.waitpid(child, 0)
    else:
        process = multiprocessing.get_context(how).Process(target=make, args=(1,))
        process.start()
        process.join()
    if later:
        strategy = hs.MirroredStrategy()
    print("total", strategy.reduce("sum", 1, axis=None), flush=True)


if __name__ == "__main__":
    main()
