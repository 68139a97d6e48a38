"""A training that restores from the memory of nodes, and checks each restored byte.

``python rememberer.py FOLDER STEPS SECONDS KIND [SAVED_EVERY]``: the ranks train a
small model made with NumPy, PyTorch or JAX, wait SECONDS in each step, and keep
snapshots in the memory of the nodes. They write a line with a hash of all state for
each step. A step that is restored, or made again, must have the hash that it had
before.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs

LENGTH = 4096
REPLICAS = 4
SNAPSHOT_EVERY, SAVED_EVERY = 4, 60


class Training:
    """Objects to save, a step, and the bytes of all state.

    With NumPy and JAX, ranks have several logical replicas, so that the bits do not
    depend on the number of ranks.
    """

    def __init__(self, kind: str) -> None:
        logical = {} if kind == "torch" else {"logical_replicas": REPLICAS}
        self.strategy = hs.MultiWorkerMirroredStrategy(**logical)
        make: dict[str, Callable[[], None]] = {
            "numpy": self._make_plain,
            "torch": self._make_torch,
            "jax": self._make_jax,
        }
        make[kind]()

    def _make_plain(self) -> None:
        self._gradient: Callable[[Any, float], Any] = lambda w, x: np.cos(w + x)
        with self.strategy.scope():
            self.weights = hs.Variable(np.linspace(0, 1, LENGTH), name="weights")
            self.seen = hs.Variable(
                np.zeros(8), name="seen", synchronization="on_read", aggregation="none"
            )
            self.optimizer = hs.optimizers.Adam(0.01)
        self.optimizer.build([self.weights])
        self.objects = {
            "weights": self.weights,
            "seen": self.seen,
            "optimizer": self.optimizer,
        }
        self.step = self._step_plain

    def _make_jax(self) -> None:
        import jax

        jax.config.update("jax_enable_x64", True)
        self._make_plain()
        gradient = jax.jit(jax.grad(lambda w, x: jax.numpy.sin(w + x).sum()))
        self._gradient = lambda w, x: np.asarray(gradient(w, x))

    def _step_plain(self, number: int) -> None:
        def step() -> None:
            replica = hs.get_replica_context().replica_id_in_sync_group
            gradient = self._gradient(self.weights.value(), float(replica + number))
            self.seen.assign(self.seen.value() * 3 % 1048573 + replica + number)
            self.optimizer.apply_gradients([(gradient, self.weights)])

        self.strategy.run(step)

    def _make_torch(self) -> None:
        import torch

        import hpcstrat.integrations.torch as hst

        # The saved state has all generators: a start without a restore must repeat it.
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net = torch.nn.Linear(LENGTH // 16, 4)
        hst.replicate(self.net, self.strategy)
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.objects = hst.state(self.net, self.adam)
        self.step = self._step_torch

    def _step_torch(self, number: int) -> None:
        import torch

        # Drawn from the saved generator, so that its state is checked, too.
        x = torch.rand(3, LENGTH // 16) + number
        self.adam.zero_grad()
        self.strategy.run(lambda: self.net(x).square().mean().backward())
        self.adam.step()

    def state_bytes(self) -> Iterator[bytes]:
        """Yield the bytes of all state of this rank."""
        for name, thing in sorted(self.objects.items()):
            if name == "generators":
                yield thing.own_state()["state"].tobytes()
            elif isinstance(thing, hs.Variable):
                yield from (np.asarray(own).tobytes() for own in thing.components)
            elif hasattr(thing, "checkpoint_variables"):
                for _, one in sorted(thing.checkpoint_variables().items()):
                    yield np.asarray(one.component).tobytes()

    def digest(self) -> str:
        """Return a hash of all state of this rank."""
        import xxhash

        found = xxhash.xxh3_64()
        for data in self.state_bytes():
            found.update(data)
        return str(found.hexdigest())


def digests_before(folder: Path, rank: int) -> dict[int, str]:
    """Return the hash of each step that former generations of this rank have made."""
    found: dict[int, str] = {}
    for path in folder.glob(f"steps-*-{rank}"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 4 and words[1] == "step":
                found[int(words[2])] = words[3]
    return found


def main() -> None:
    """Run the rest of the steps."""
    folder, steps, nap = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    training = Training(sys.argv[4])
    strategy = training.strategy
    rank, number = strategy.all_ranks.rank, int(os.environ["HPCSTRAT_WATCH_GENERATION"])
    before = digests_before(folder, rank)
    every = int(sys.argv[5]) if len(sys.argv) > 5 else SAVED_EVERY
    options = hs.CheckpointOptions(memory=SNAPSHOT_EVERY, every=every)
    manager = hs.CheckpointManager(
        folder / "checkpoints", options=options, **training.objects
    )
    with (folder / f"steps-{number}-{rank}").open("a", buffering=1) as log:

        def check(word: str, step: int) -> None:
            digest = training.digest()
            right = not step or before.get(step, digest) == digest
            if word == "restored" or not right:
                known = right and (not step or step in before)
                log.write(f"{time.time()} restored {step} {known}\n")
            if word == "step":
                log.write(f"{time.time()} step {step} {digest}\n")

        step = manager.restore_or_initialize() or 0
        check("restored", step)
        (folder / f"source-{number}-{rank}").write_text(f"{manager.last_restore}\n")
        while step < steps:
            time.sleep(nap)
            training.step(step)
            step += 1
            check("step", step)
            manager.save_if_due(step, overwrite=True)
        manager.complete()
        if rank == 0:
            (folder / "result").write_text(training.digest())


if __name__ == "__main__":
    main()
