"""The program of a rank of ``hpcstrat.testing.run``: executes a function call."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.testing.job import note_rank, wait_until, write_whole

# Seconds that a failed rank waits for other ranks to write their failures.
_GRACE_SECONDS = 1.0


def _call(folder: Path) -> bytes:
    """Read the function call from the job's folder, and return its pickled result."""
    import cloudpickle

    path, call = pickle.loads((folder / "call").read_bytes())
    sys.path.extend(entry for entry in path if entry not in sys.path)
    function, args = cloudpickle.loads(call)
    result: bytes = cloudpickle.dumps(function(*args))
    return result


def _fail(folder: Path, rank: int, size: int, exc: BaseException) -> NoReturn:
    """Write an exception to a file, and end this rank as an uncaught exception does."""
    while (
        exc.__traceback__ and exc.__traceback__.tb_frame.f_code.co_filename == __file__
    ):
        # Begin the traceback at the user's function.
        exc.__traceback__ = exc.__traceback__.tb_next
    text = "".join(traceback.format_exception(exc))
    write_whole(folder / f"{rank}.failure", text.encode())

    def all_wrote() -> bool:
        done = [*folder.glob("*.failure"), *folder.glob("*.result")]
        return len(done) >= size

    # Wait, because the end of this rank ends all ranks, before they could report.
    wait_until(all_wrote, _GRACE_SECONDS)
    # The library's exception hook aborts the job here. Without it, the process exits
    # without MPI_Finalize, which would wait for ranks that wait for this rank.
    sys.excepthook(type(exc), exc, exc.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Call the function on this rank, and write its result or error to a file."""
    folder = Path(sys.argv[1])
    launch = launch_from_environment()
    note_rank(folder, launch.rank)
    try:
        result = _call(folder)
    except BaseException as exc:
        _fail(folder, launch.rank, launch.size, exc)
    write_whole(folder / f"{launch.rank}.result", result)


if __name__ == "__main__":
    main()
