"""The ranks of a job that runs many programs: ``python -m tests.fuzz.job FOLDER``.

Each rank appends its results to a separate file, so that no result is lost when the
rank dies.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tests.fuzz.machine import Machine
from tests.fuzz.program import Program, parse
from tests.spins import keep_spins_short

__all__ = ["main", "observe"]


def observe(
    machine: Machine, program: Program, note: Callable[[int], None]
) -> list[tuple[Any, ...]]:
    """Run a program, and return this rank's result of each operation."""
    seen: list[tuple[Any, ...]] = []
    for number, op in enumerate(program.ops):
        note(number)
        try:
            seen.append(("ok", machine.do(op)))
        except BaseException as error:
            names = tuple(kind.__name__ for kind in type(error).__mro__)
            seen.append(("raise", names, str(error)))
            if op.kind in ("strategy", "restart", "variable"):
                break
        if machine.over:
            break
    return seen


def _write(file: BinaryIO, entry: Any) -> None:
    pickle.dump(entry, file)
    file.flush()


def main() -> None:
    """Run the programs of a folder, in order."""
    warnings.simplefilter("ignore")
    # Fail without an argument before MPI is loaded, in which a rank may wait forever.
    folder = Path(sys.argv[1])
    from mpi4py import MPI

    keep_spins_short()
    world = MPI.COMM_WORLD.Dup()
    # Snapshots need a folder that ends with the job.
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    os.environ["HPCSTRAT_WATCH_MEMORY"] = str(memory)
    programs = pickle.loads((folder / "programs").read_bytes())
    with (folder / f"{world.rank}.seen").open("ab") as file:
        for number, text in programs:

            def note(place: int, number: int = number) -> None:
                _write(file, ("begin", number, place))

            machine = Machine(world, folder / f"checkpoints-{number}")
            with np.errstate():
                seen = observe(machine, parse(text), note)
                machine.end()
            _write(file, ("end", number, seen))
            world.Barrier()
            if world.rank == 0:
                machine.clear()
            del machine
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
