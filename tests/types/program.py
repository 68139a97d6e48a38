"""A user program with annotations, in which type checkers find no error.

The strict modes of mypy and Pyright check this program with the installed package, and
a test runs it. The types in ``assert_type`` are those that users see in their editors.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import assert_type

import numpy as np
import numpy.typing as npt

import hpcstrat as hs

Array = npt.NDArray[np.float64]


class Histogram:
    """A histogram whose counts are saved in checkpoints."""

    def __init__(self) -> None:
        self.counts = hs.Variable(
            np.zeros(4, np.int64),
            synchronization="on_read",
            aggregation=hs.VariableAggregation.SUM,
            name="counts",
        )

    def add(self, rows: Array) -> None:
        """Count numbers by their quarter."""
        self.counts.assign_add(np.histogram(rows, 4)[0])

    def checkpoint_variables(self) -> Mapping[str, hs.Variable]:
        """Return the saved values by name."""
        return {"counts": self.counts}


class RootMeanSquare(hs.optimizers.Optimizer):
    """A user's own update rule."""

    state: Mapping[str, float] = {"mean_square": 0.0}

    def update(
        self,
        step: hs.optimizers.Step,
        gradient: Array,
        value: Array,
        mean_square: Array,
    ) -> None:
        """Change a variable and its state in place."""
        mean_square *= 0.9
        mean_square += 0.1 * gradient**2
        value -= step.rate * gradient / (np.sqrt(mean_square) + 1e-7)


def train(folder: str, strategy: hs.Strategy) -> float:
    """Fit weights; return the last loss."""
    with strategy.scope():
        weights = hs.Variable(np.zeros(8), name="weights")
        optimizer = RootMeanSquare(0.1)
        histogram = Histogram()
        mean = hs.metrics.Mean(name="loss")
    assert_type(weights.name, str)
    assert_type(weights.shape, tuple[int, ...])
    assert_type(strategy.num_replicas_in_sync, int)

    x = np.random.default_rng(0).normal(size=(100, 8))
    dataset = hs.Dataset((x, x @ np.arange(8.0)), batch_size=20, shuffle=True)
    assert_type(dataset, hs.Dataset)

    def step(rows: Array, targets: Array) -> Array:
        error = rows @ weights.value() - targets
        optimizer.apply_gradients([(rows.T @ error / 20, weights)])
        histogram.add(error)
        mean.update_state(error**2)
        context = hs.get_replica_context()
        assert context is not None
        assert 0 <= context.replica_id_in_sync_group < context.num_replicas_in_sync
        return np.asarray(hs.compute_average_loss(error**2, global_batch_size=20))

    manager = hs.CheckpointManager(
        folder,
        weights=weights,
        optimizer=optimizer,
        histogram=histogram,
        keep_best=hs.KeepBest("loss", count=1, mode="min"),
    )
    restored = manager.restore_or_initialize()
    assert_type(restored, int | None)
    loss = np.inf
    for epoch in range(2):
        for batch in strategy.experimental_distribute_dataset(dataset):
            losses = strategy.run(step, args=batch)
            loss = float(strategy.reduce(hs.ReduceOp.SUM, losses, axis=None))
        manager.save(epoch, metrics={"loss": float(mean.result())})
    return loss


def options() -> hs.CommunicationOptions:
    """Return options whose values an editor completes."""
    return hs.CommunicationOptions(
        bytes_per_pack=1 << 20,
        implementation=hs.CommunicationImplementation.AUTO,
    )


def main() -> None:
    """Train with checkpoints in the given folder, and print the loss."""
    logger = hs.get_logger("program")
    assert_type(logger, logging.Logger)
    strategy = hs.MultiWorkerMirroredStrategy(communication_options=options())
    try:
        loss = train(sys.argv[1], strategy)
    except hs.RankLostError as error:
        logger.warning("a rank was lost: %s", error)
        raise
    logger.info("trained on %d replicas", strategy.num_replicas_in_sync)
    hs.print_once(f"loss {loss:.3f}")


if __name__ == "__main__":
    main()
