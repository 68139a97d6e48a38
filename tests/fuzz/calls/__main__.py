"""Random calls on the ranks of this job: ``mpirun -n 2 python -m tests.fuzz.calls``.

A session is a sequence of calls by a few strategies: over all ranks, with the compiled
kernel and without it, and over groups of ranks. Its calls depend only on the seed, its
number and its number of calls. The program prints each wrong result and each unexpected
error, with the session and the call; ``--sessions`` makes only some sessions again.
With ``HPCSTRAT_NATIVE=0`` no strategy has the kernel. If a session takes longer than
``--limit``, the program prints the ranks' stacks and ends the job.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter

from mpi4py import MPI

from tests.fuzz.calls.session import Session, Stopped
from tests.mpi.ranks.conftest import LAYOUTS
from tests.spins import keep_spins_short

__all__ = ["main"]

_GRACE_SECONDS = 5.0
_MOST_SHOWN = 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.calls")
    parser.add_argument("--seed", type=int, default=1, help="of all sessions")
    parser.add_argument("--sessions", default="0:19", help="FIRST:LAST, or one")
    parser.add_argument("--calls", type=int, default=500, help="calls of a session")
    parser.add_argument(
        "--layout", default="one_worker", choices=[x.name for x in LAYOUTS]
    )
    parser.add_argument(
        "--short-spins", action="store_true", help="let ranks sleep soon"
    )
    parser.add_argument("--show", action="store_true", help="print the counts by kind")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="of one session"
    )
    return parser.parse_args()


def _session(
    comm: MPI.Intracomm, arguments: argparse.Namespace, number: int
) -> Session:
    """Run a session, and return it with its problems; abort the job if it stops."""
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    [layout] = [one for one in LAYOUTS if one.name == arguments.layout]
    session = Session(comm, layout.make_strategy, arguments.seed, number)
    try:
        session.run(arguments.calls)
        session.close()
    except Stopped as error:
        said = "\n".join([*session.problems[:_MOST_SHOWN], str(error)])
        print(said, file=sys.stderr, flush=True)
        # Other ranks may still print their own errors.
        time.sleep(_GRACE_SECONDS)
        comm.Abort(1)
    faulthandler.cancel_dump_traceback_later()
    return session


def main() -> int:
    """Run sessions; return 1 if a result was wrong on a rank."""
    arguments = _arguments()
    if arguments.short_spins:
        keep_spins_short()
    comm = MPI.COMM_WORLD.Dup()
    first, _, last = arguments.sessions.partition(":")
    counts, num_problems, begin = Counter[str](), 0, time.monotonic()
    for number in range(int(first), int(last or first) + 1):
        session = _session(comm, arguments, number)
        counts.update(session.counts)
        for text in session.problems[:_MOST_SHOWN]:
            print(text, file=sys.stderr, flush=True)
        num_problems += comm.allreduce(len(session.problems))
    if comm.rank == 0:
        seconds = time.monotonic() - begin
        if arguments.show:
            for name, count in sorted(counts.items()):
                print(f"{count:6} {name}")
        print(
            f"{counts.total()} calls of rank 0 on {comm.size} ranks, "
            f"{arguments.layout}: {num_problems} wrong results, {seconds:.0f} s"
        )
    return int(num_problems > 0)


if __name__ == "__main__":
    sys.exit(main())
