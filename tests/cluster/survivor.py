"""A program of MPI that watchers start again and again, with an exact oracle.

``python survivor.py FOLDER STEPS SECONDS``: the ranks update the parts of one array,
wait SECONDS in each step, and save the array to FOLDER every third step. Each rank
checks every array that it restores, and writes a line for each step.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 4096
SAVED_EVERY = 3


def start_state() -> Any:
    """Return the array before the first step."""
    return np.arange(LENGTH, dtype=np.uint64)


def advance(state: Any, step: int) -> Any:
    """Return the array, or a part of it, after one more step."""
    return state * np.uint64(6364136223846793005) + np.uint64(step)


def state_after(steps: int) -> Any:
    """Return the right array after some steps."""
    state = start_state()
    for step in range(steps):
        state = advance(state, step)
    return state


def main() -> None:
    """Run the rest of the steps."""
    from mpi4py import MPI

    from hpcstrat.elastic import report_progress

    folder, steps, nap = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    world = MPI.COMM_WORLD
    number = int(os.environ["HPCSTRAT_WATCH_GENERATION"])
    with (folder / f"steps-{number}-{world.rank}").open("a", buffering=1) as log:
        saved = sorted(folder.glob("state-*"), key=lambda p: int(p.name[6:]))
        state, step = start_state(), 0
        if newest := world.bcast(saved[-1].name if saved else ""):
            state, step = np.load(folder / newest), int(newest[6:])
        is_right = bool((state == state_after(step)).all())
        log.write(f"{time.time()} restored {step} {is_right}\n")
        own = slice(
            world.rank * LENGTH // world.size, (world.rank + 1) * LENGTH // world.size
        )
        while step < steps:
            time.sleep(nap)
            state = np.concatenate(world.allgather(advance(state[own], step)))
            step += 1
            if step % SAVED_EVERY == 0 and world.rank == 0:
                # A save by an old generation would be found by its wrong steps.
                partial = folder / f".partial-{number}"
                with partial.open("wb") as file:
                    np.save(file, state)
                partial.rename(folder / f"state-{step}")
            log.write(f"{time.time()} step {step} {os.uname().nodename}\n")
            report_progress(step)
        if world.rank == 0:
            (folder / "result").write_text(str(zlib.crc32(state.tobytes())))
        world.Barrier()


if __name__ == "__main__":
    main()
