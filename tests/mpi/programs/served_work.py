"""Count functions on servers although ranks die: ``served_work.py FOLDER OPTIONS``.

The options are in JSON. Each function adds one to its own element of ``done``;
``counts`` says how often each function has run. ``again`` lists the functions that a
lost worker had: these may count twice, all other functions count once. Each round ends
with a checkpoint, from which the coordinator continues when a server is lost. The
program does not end before spare ranks have taken the places of lost ranks; ``vacant``
is the number of places without a rank. All ranks write their process numbers into
FOLDER.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.cluster_resolver import launch_from_environment

LENGTH = 3000


class Ledger:
    """A record of the functions that lost workers had."""

    def __init__(self, coordinator: Any) -> None:
        self.again: list[int] = []
        self.losses = 0
        self._workers = coordinator._by_rank
        self._lose = coordinator._mailbox.on_loss
        coordinator._mailbox.on_loss = self.lose

    def lose(self, lost: set[int]) -> None:
        """Record the functions of lost workers, which run again on other workers."""
        self.losses += len(lost)
        for rank in lost:
            if rank in self._workers:
                calls = self._workers[rank].under_way.values()
                self.again += [c.args[0][0] for c in calls if not c.keep]
        self._lose(lost)


class Program:
    """The program of the coordinator."""

    def __init__(self, folder: Path, options: dict[str, Any], strategy: Any) -> None:
        self.folder, self.options = folder, options
        self.coordinator = hs.coordinator.ClusterCoordinator(strategy)
        self.ledger = Ledger(self.coordinator)
        length = options["rounds"] * options["functions"]
        with strategy.scope():
            self.done = hs.Variable(np.zeros(length, np.int64), name="done")
            self.whole = hs.Variable(np.zeros(LENGTH), name="whole")
            self.slow = hs.Variable(np.zeros(3), name="slow")
            self.optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
        self.manager = hs.CheckpointManager(
            folder / "saved",
            net=[self.done, self.whole, self.slow],
            optimizer=self.optimizer,
        )
        # An iterator for each worker. A spare rank that takes a lost worker's place has
        # an iterator of the same dataset.
        data = self.coordinator.create_per_worker_dataset(itertools.count)
        self.iterator = iter(data)
        # For each saved step, the functions that had run again by then.
        self.saved: dict[int, list[int]] = {}
        self.result: dict[str, Any] = {}

    def function(self) -> Callable[..., int]:
        """Return the function that is scheduled on workers."""
        done, whole, slow, optimizer = self.done, self.whole, self.slow, self.optimizer
        seconds = self.options["seconds"]
        ones, one = np.ones(LENGTH), np.ones(1, np.int64)

        def work(number: int, iterator: Any) -> int:
            time.sleep(seconds)
            next(iterator)
            whole.assign_add(ones, read_value=False)
            optimizer.apply_gradients([(np.ones(3), slow)])
            done.scatter_add(hs.IndexedSlices(one, [number]))
            return number

        return work

    def run(self) -> None:
        """Run all rounds, and write the result."""
        work, rounds = self.function(), self.options["rounds"]
        step = self.guarded(lambda: self.save(0))
        while step < rounds or self.waits():
            step = self.guarded(lambda step=step: self.run_round(step, work))
        self.result.update(again=self.ledger.again, losses=self.ledger.losses)
        (self.folder / "0.result").write_text(json.dumps(self.result))

    def waits(self) -> bool:
        """Return whether a loss, or a spare rank for a lost place, is still to come."""
        strategy = self.coordinator.strategy
        lost, roles = strategy.client.mailbox.lost, strategy.roles
        vacant = lost.intersection((*roles.servers, *roles.workers))
        self.result["vacant"] = len(vacant)
        takes = bool(vacant) and not lost.issuperset(roles.spares)
        return takes or self.ledger.losses < self.options["losses"]

    def guarded(self, action: Callable[[], int]) -> int:
        """Return the step to run next, after a loss the checkpoint's step."""
        try:
            return action()
        except hs.UnavailableError:
            if not self.saved:
                raise
        while True:
            try:
                self.coordinator.recover()
                step = self.manager.restore()
                self.ledger.again[:] = self.saved[step]
                return step
            except hs.UnavailableError:
                continue

    def run_round(self, step: int, work: Callable[..., int]) -> int:
        """Run the functions of a round, and save their counts."""
        many = self.options["functions"]
        if step == self.options["rounds"]:
            # Wait: a rank is still to be lost, or to take the place of a lost rank.
            self.coordinator.schedule(time.sleep, (0.01,)).fetch()
            return step
        numbers = range(step * many, (step + 1) * many)
        values = []
        for number in numbers:
            values.append(self.coordinator.schedule(work, (number, self.iterator)))
            if len(values) == many // 4:
                (self.folder / "started").touch()
        self.coordinator.join()
        assert self.coordinator.fetch(values) == list(numbers)
        return self.save(step + 1)

    def save(self, step: int) -> int:
        """Save a step, and record the values of the variables in the result."""
        values = self.whole.numpy()
        pieces = [values[a:b] for a, b in self.whole.shard_rows]
        self.result.update(
            counts=self.done.numpy().tolist(),
            whole=[sorted(set(piece.tolist())) for piece in pieces],
            iterations=int(self.optimizer.iterations.numpy()),
        )
        self.manager.save(step, overwrite=True)
        self.saved[step] = list(self.ledger.again)
        return step


def main() -> None:
    """Make the strategy, and run the program on the coordinator."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = launch_from_environment().rank
    (folder / f"{rank}.process").write_text(str(os.getpid()))
    strategy = hs.ParameterServerStrategy(
        num_ps=options["servers"],
        spare_ranks=options["spares"],
        variable_partitioner=hs.partitioners.FixedShardsPartitioner(3),
        on_lost_rank="raise",
    )
    Program(folder, options, strategy).run()


if __name__ == "__main__":
    main()
