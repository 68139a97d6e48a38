"""One rank of a replay job: run the job's programs one after the other.

``python -m tests.conformance.worker JOB.json``, under ``mpirun``. Each rank appends its
events to a separate file, line by line, so that the process that started the job knows
all events until a crash or a hang.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from tests.conformance.program import run_program
from tests.conformance.session import Session, describe_error
from tests.spins import keep_spins_short

__all__ = ["main"]


class _Log:
    """The rank's file of events."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, **event: Any) -> None:
        """Append one event."""
        self._file.write(json.dumps(event) + "\n")


def _sub_communicators(world: MPI.Intracomm) -> dict[int, MPI.Comm | None]:
    """Return a communicator of the first n ranks for each n; None on other ranks."""
    comms: dict[int, MPI.Comm | None] = {}
    for size in range(1, world.size + 1):
        color = 0 if world.rank < size else MPI.UNDEFINED
        comm = world.Split(color, world.rank)
        comms[size] = None if comm == MPI.COMM_NULL else comm
    return comms


def _run_case(
    job: dict[str, Any],
    index: int,
    comm: MPI.Intracomm,
    comms: dict[int, MPI.Comm | None],
    log: _Log,
) -> tuple[dict[str, Any], list[Any]]:
    """Run one program; return its record, and the strategies that it left open."""
    case = job["cases"][index]
    directory = Path(job["directory"]) / f"case{index}"
    opened: list[Any] = []

    def agree(condition: bool) -> bool:
        return all(comm.allgather(condition))

    try:
        session = Session(case, comms, directory, opened, agree)
        record = run_program(session, lambda step: log.write(step=step))
    except Exception as error:
        return {"steps": [], "broken": describe_error(error)}, opened
    return record, _close_early(record, opened, session.strategy)


def _close_early(record: dict[str, Any], opened: list[Any], last: Any) -> list[Any]:
    """Close the last strategy if its program ran to the end; return the open ones.

    A replica that failed waits in its announcement for the next call of the other
    replicas, and closing is such a call. Ranks outside of this strategy do not know how
    the program ended.
    """
    seen = record["steps"][-1].get("seen") if record["steps"] else None
    if isinstance(seen, dict) and "error" in seen:
        return opened
    if last not in opened:
        return opened
    try:
        last.close()
    except RuntimeError as error:
        record["late"] = describe_error(error)
        return opened
    return [strategy for strategy in opened if strategy is not last]


def _close_late(comm: MPI.Intracomm, opened: list[Any]) -> None:
    """Close the strategies that an error has left open, after all ranks are here."""
    if not any(comm.allgather(bool(opened))):
        return
    for strategy in reversed(opened):
        try:
            strategy.close()
        except RuntimeError:
            # Ranks cannot agree to close a channel that an error has broken.
            continue


def main() -> None:
    """Run the cases in ``job['order']``."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    keep_spins_short()
    world = MPI.COMM_WORLD
    comm = world.Dup()
    log = _Log(Path(job["directory"]) / f"rank{comm.rank}.jsonl")
    stacks = Path(job["directory"]) / f"rank{comm.rank}.stacks"
    # The starting process requests the stacks before it ends a job that hangs.
    with stacks.open("a", encoding="utf-8") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        comms = _sub_communicators(world)
        log.write(pid=os.getpid())
        for index in job["order"]:
            comm.Barrier()
            log.write(begin=index)
            record, opened = _run_case(job, index, comm, comms, log)
            log.write(end=index, record=record)
            _close_late(comm, opened)
        comm.Barrier()
        log.write(finished=True)
        faulthandler.unregister(signal.SIGUSR1)


if __name__ == "__main__":
    main()
