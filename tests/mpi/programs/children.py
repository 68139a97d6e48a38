"""Make a strategy in a child of each rank: ``children.py spawn|fork|forkserver|raw``.

With ``later``, MPI has not started yet when the children start. With ``import``, the
children make the strategy while they import this program, like a program without ``if
__name__ == "__main__"``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import partial

import hpcstrat as hs


def make(say: int) -> None:
    """Try to make a strategy in the child, and write "made" or the error to a pipe."""
    try:
        hs.MirroredStrategy()
        text = "made"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    os.write(say, f"child: {text}\n".encode())


def main() -> None:
    """Start the child, wait for it, then reduce."""
    how, when = sys.argv[1:3]
    later, work = when == "later", os.getpid if when == "import" else partial(make, 1)
    if not later:
        strategy = hs.MirroredStrategy()
    if how == "raw":
        child = os.fork()
        if child == 0:
            make(1)
            os._exit(0)
        os.waitpid(child, 0)
    else:
        process = multiprocessing.get_context(how).Process(target=work)
        process.start()
        process.join()
    if later:
        strategy = hs.MirroredStrategy()
    print("total", strategy.reduce("sum", 1, axis=None), flush=True)


if __name__ == "__main__":
    main()
elif sys.argv[2] == "import":
    make(1)
