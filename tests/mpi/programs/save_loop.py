"""Save again and again until killed: ``save_loop.py FOLDER STEPS HOW [RANKS]``.

Each value follows from the step, so that a test can check any checkpoint bit for bit.
Rank 0 writes the number of each step into ``FOLDER/acknowledged`` when the save of this
step is acknowledged. Each rank writes its process number into ``FOLDER/pids``, and
``FOLDER/started`` exists when all ranks have done this. A job first restores, and
checks the restored values. ``HOW`` is ``wait`` (for each save) or ``go`` (continue
while the save runs). ``RANKS`` is the number of ranks of a replica, which divide a
variable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs

# Large enough that every rank writes some blocks.
LARGE, SMALL = 500_000, 40
FIELD = (151, 7, 401)


def make_objects() -> dict[str, Any]:
    """Return the saved variables of the current strategy, with all values zero."""
    rows = hs.get_strategy().inside.part(FIELD[2])
    part = np.zeros((*FIELD[:2], rows.stop - rows.start))
    return {
        "field": hs.Variable(part, split=2, name="field"),
        "large": hs.Variable(np.zeros(LARGE), name="large"),
        "small": [hs.Variable(np.zeros(7, np.float32)) for _ in range(SMALL)],
        "seen": hs.Variable(
            0, dtype="int64", synchronization="on_read", aggregation="sum", name="seen"
        ),
    }


def large_value(step: int) -> Any:
    """Return the value of the large variable after a step."""
    return np.random.default_rng(step).standard_normal(LARGE)


def field_value(step: int) -> Any:
    """Return the whole value of the divided variable after a step."""
    return np.random.default_rng([step, 1]).standard_normal(FIELD)


def problems(objects: dict[str, Any], step: int, seen: int) -> list[str]:
    """Return the problems of restored objects; collective."""
    found = []
    if objects["field"].numpy().tobytes() != field_value(step).tobytes():
        found.append(f"field is not that of step {step}")
    if objects["large"].numpy().tobytes() != large_value(step).tobytes():
        found.append(f"large is not that of step {step}")
    for index, small in enumerate(objects["small"]):
        if not (small.numpy() == np.float32(step + index)).all():
            found.append(f"small/{index} is not that of step {step}")
    if seen != 10 * step + 3:
        found.append(f"seen is {seen} at step {step}")
    return found


def assign(strategy: Any, objects: dict[str, Any], step: int) -> None:
    """Assign the values of a step to all variables; collective."""
    objects["large"].assign(large_value(step))
    rows = strategy.inside.part(FIELD[2])
    objects["field"].assign(field_value(step)[..., rows])
    for index, small in enumerate(objects["small"]):
        small.assign(np.full(7, step + index, np.float32))
    with strategy.scope():
        objects["seen"].assign(10 * step + 3)


def main() -> None:
    """Restore, check, and save steps until the limit or a kill."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    goes_on = sys.argv[3] == "go"
    ranks_per_replica = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    strategy = hs.MultiWorkerMirroredStrategy(ranks_per_replica=ranks_per_replica)
    with strategy.scope():
        objects = make_objects()
    ranks = strategy.all_ranks
    (folder / "pids" / str(ranks.rank)).write_text(str(os.getpid()))
    ranks.collectives.barrier("start")
    (folder / "started").touch()
    manager = hs.CheckpointManager(folder / "checkpoints", max_to_keep=2, **objects)
    acknowledged = os.open(
        folder / "acknowledged", os.O_RDWR | os.O_CREAT | os.O_APPEND
    )
    text = strategy.broadcast_object(os.pread(acknowledged, 1 << 20, 0))
    step = manager.restore_or_initialize()
    newest = max(map(int, text.split()), default=0)
    if (step or 0) < newest:
        raise AssertionError(f"step {newest} was acknowledged, {step} is restored")
    if step is not None:
        with strategy.scope():
            seen = int(objects["seen"].numpy())
        if wrong := problems(objects, step, seen):
            raise AssertionError("; ".join(wrong))
    step = step or 0
    for number in range(step + 1, step + 1 + steps):
        assign(strategy, objects, number)
        manager.save(number, asynchronous=goes_on)
        # With background saves, the previous save is durable when the next save begins.
        told = number - 1 if goes_on else number
        if ranks.rank == 0 and told > step:
            os.write(acknowledged, f"{told}\n".encode())
    print("saved", steps, "steps after", step, flush=True)


if __name__ == "__main__":
    main()
