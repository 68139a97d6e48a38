"""Train, resume from the newest checkpoint, or be killed: ``resume.py FOLDER HOW``.

``HOW`` is ``plain`` (all steps, no checkpoints), ``wait`` (resume, save a step, and be
killed), ``go`` (the same with a save in the background during the training) or ``end``
(resume and train to the end). Each rank writes into ``FOLDER/HOW-<rank>`` the step at
which it began, and at the end all state that must be equal, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs

# Steps that end with a checkpoint: one in the middle of the first epoch, one in the
# middle of the second. An epoch has six batches, and the last batch is smaller.
SAVED = {"wait": 4, "go": 9}
STEPS, ROWS, BATCH, WIDTH = 15, 23, 4, 3


class Counter:
    """A list of the rows seen, as an example of a program's own state."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Training:
    """A model whose gradients depend on everything that a checkpoint saves."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        rows = np.random.default_rng(1).standard_normal((ROWS, WIDTH))
        on_read: Any = {"synchronization": "on_read"}
        with strategy.scope():
            self.w = hs.Variable(np.full(WIDTH, 0.5), name="w")
            self.half = hs.Variable(np.ones(2, np.float16), name="half")
            self.seen = hs.Variable(np.int64(0), aggregation="sum", **on_read)
            self.own = hs.Variable(np.zeros(2), aggregation="none", **on_read)
            self.optimizer = hs.optimizers.Adam(0.05)
            self.momentum = hs.optimizers.SGD(0.1, momentum=0.9)
        self.noise = strategy.random("noise", seed=5)
        self.counter = Counter()
        dataset = hs.Dataset(
            {"x": rows, "id": np.arange(ROWS)}, BATCH, shuffle=True, seed=4
        )
        self.data = strategy.experimental_distribute_dataset(dataset)
        self.objects = {
            "net": {"w": self.w, "half": self.half},
            "seen": self.seen,
            "own": self.own,
            "adam": self.optimizer,
            "momentum": self.momentum,
            "noise": self.noise,
            "counter": self.counter,
            "data": self.data,
        }

    def batches(self) -> Iterator[Any]:
        """Yield the batches of one epoch after the other, without end."""
        while True:
            yield from self.data

    def step(self, batch: Any) -> None:
        """Make a training step on this replica."""
        rows = batch["x"] * self.w.value() + self.noise.generator.random(WIDTH)
        shared = self.noise.shared.random()
        own = self.own.value() + rows.sum() + shared
        self.own.assign(own)
        # Let the gradient depend on a variable that differs between replicas.
        gradient = rows.sum(axis=0) + own[0] * 1e-3
        self.optimizer.apply_gradients([(gradient, self.w)])
        half = np.full(2, rows.sum() / 64, np.float16)
        self.momentum.apply_gradients([(half, self.half)])
        self.seen.assign_add(len(batch["id"]))

    def train(self, batches: Iterator[Any]) -> None:
        """Make a training step on all replicas."""
        batch = next(batches)
        self.strategy.run(self.step, args=(batch,))
        ids = self.strategy.gather(batch["id"], axis=0)
        self.counter.rows = [*self.counter.rows, *ids.tolist()]

    def result(self) -> dict[str, Any]:
        """Return all state of this replica."""
        with self.strategy.scope():
            found: dict[str, Any] = {"seen": int(self.seen.numpy())}
        parts = {"w": self.w, "half": self.half, "own": self.own}
        for optimizer in (self.optimizer, self.momentum):
            for name, slot in optimizer.checkpoint_variables().items():
                parts[f"{type(optimizer).__name__}/{name}"] = slot
        found |= {k: one.component.tobytes().hex() for k, one in parts.items()}
        found["noise"] = self.noise.generator.random(3).tobytes().hex()
        found["shared"] = self.noise.shared.random(3).tobytes().hex()
        found["rows"] = self.counter.rows
        found["position"] = self.data.state()
        return found


def main() -> None:
    """Train from the step of the newest checkpoint."""
    folder, how = Path(sys.argv[1]), sys.argv[2]
    strategy = hs.MultiWorkerMirroredStrategy()
    training = Training(strategy)
    manager = hs.CheckpointManager(folder / "checkpoints", **training.objects)
    began = None if how == "plain" else manager.restore_or_initialize()
    file = folder / f"{how}-{strategy.replica_id}"
    file.write_text(json.dumps({"began": began}))
    batches = training.batches()
    for number in range((began or 0) + 1, STEPS + 1):
        training.train(batches)
        if number == SAVED.get(how):
            manager.save(number, asynchronous=how == "go")
        if number == SAVED.get(how, STEPS) + 2:
            # The save is acknowledged; the steps since the save are lost.
            manager.wait()
            strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    file.write_text(json.dumps({"began": began, "result": training.result()}))


if __name__ == "__main__":
    main()
