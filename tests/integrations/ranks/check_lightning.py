"""Lightning's Trainer over the ranks of MPI: positions, predictions, and notices."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from hpcstrat.strategies.connection import subset
from tests.mpi.ranks.effort import seeds
from tests.mpi.ranks.outcomes import outcome

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins.environments import MPIEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

import hpcstrat.integrations.lightning as hsl  # noqa: E402
from tests.integrations.programs.lightning_rows import (  # noqa: E402
    NumberedRows,
    RowsLearner,
    quiet_trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Make the default process group, which the Trainers then use."""
    torch.set_num_threads(1)
    dist.init_process_group("hpcstrat")
    yield
    dist.destroy_process_group()


class Stop(Exception):
    """Ends a training early."""


class Stopper(lightning.Callback):  # type: ignore[misc]
    """Saves into this rank's file after some batches, and ends the training."""

    def __init__(self, path: Path, batches: int, *, at_end: bool) -> None:
        self.path, self.left, self.at_end = path, batches, at_end

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if self.left <= 0 and not self.at_end:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if self.left <= 0:
            self._stop(trainer)

    def _stop(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.path)
        raise Stop


def over_all(job: Any) -> dict[str, Any]:
    """Return options of a Trainer over all ranks of the job."""
    environment = MPIEnvironment()
    return {
        "devices": job.size,
        "strategy": DDPStrategy(
            process_group_backend="hpcstrat", cluster_environment=environment
        ),
    }


def drawn_batches(draw: random.Random, rows: int) -> dict[str, Any]:
    """Return random options of `Dataset.batch`, and of `GlobalBatchSampler`."""
    size = draw.randint(1, rows)
    costs = np.array([draw.randint(1, 9) for _ in range(rows)], float)
    return draw.choice(
        [
            {"batch_size": size},
            {"batch_size": size, "drop_remainder": True},
            {"batch_size": size, "costs": costs},
            {"batch_size": None, "costs": costs, "max_cost": draw.uniform(9, 30)},
        ]
    )


@pytest.mark.parametrize("seed", seeds(60))
def test_each_row_is_seen_once_after_a_stop(seed: int, folder: Any, job: Any) -> None:
    """A Trainer on some ranks continues what a Trainer on other ranks has begun."""
    draw = random.Random(seed)
    rows, epochs = draw.randint(1, 25), draw.randint(1, 3)
    options = drawn_batches(draw, rows)
    # The batches of one process that is never stopped.
    alone = hst.GlobalBatchSampler(
        NumberedRows(rows),
        strategy=hs.get_strategy(),
        shuffle=True,
        seed=seed,
        **options,
    )
    expected = [list(map(sorted, alone)) for _ in range(epochs)]
    if "drop_remainder" not in options:
        numbers = [*range(rows)]
        assert all(sorted(chain(*batches)) == numbers for batches in expected)
    batches = draw.randint(1, sum(map(len, expected)))
    # Lightning does not restore positions at the end of an epoch: see the next test.
    at_end = "max_cost" not in options and draw.random() < 0.3
    counts = draw.randint(1, job.size), draw.randint(1, job.size)
    seen = []
    for turn, count in enumerate(counts):
        if job.rank < count:
            comm = subset(range(count))
            with hs.MultiWorkerMirroredStrategy(comm=comm) as strategy:
                sampler = hst.GlobalBatchSampler(
                    NumberedRows(rows),
                    strategy=strategy,
                    shuffle=True,
                    seed=seed,
                    **options,
                )
                net = RowsLearner(strategy)
                stopper = Stopper(
                    Path(folder, f"{job.rank}.ckpt"), batches, at_end=at_end
                )
                trainer = quiet_trainer(
                    *([] if turn else [stopper]),
                    folder=folder,
                    devices=1,
                    max_epochs=epochs,
                )
                path = Path(folder, "0.ckpt") if turn else None
                error = outcome(trainer.fit, net, sampler.loader(), ckpt_path=path)
                assert error is None or isinstance(error, Stop), error
                assert (turn == 0) == isinstance(error, Stop)
                seen += net.seen
        job.Barrier()
    found: dict[tuple[int, int], list[int]] = {}
    for epoch, number, part in chain(*job.allgather(seen)):
        found.setdefault((epoch, number), []).extend(part)
    told: list[list[list[int]]] = [[] for _ in range(epochs)]
    for (epoch, _), rows_of_batch in sorted(found.items()):
        told[epoch].append(sorted(rows_of_batch))
    assert told == expected


def test_a_batch_of_another_epoch_is_refused(folder: Any, job: Any) -> None:
    """With max_cost, Lightning has requested it before it says which epoch it is."""
    path = Path(folder, f"{job.rank}.ckpt")
    with hs.MultiWorkerMirroredStrategy() as strategy:
        for epoch in (None, None, 1):
            stopper = Stopper(path, 1, at_end=True)
            sampler = hst.GlobalBatchSampler(
                NumberedRows(9), None, strategy, costs=np.ones(9), max_cost=3
            )
            before = path if path.exists() else None
            if epoch is not None:
                sampler.epoch = epoch
            trainer = quiet_trainer(
                *([] if before else [stopper]), folder=folder, devices=1, max_epochs=2
            )
            net = RowsLearner(strategy)
            error = outcome(trainer.fit, net, sampler.loader(), ckpt_path=before)
            if before is None:
                assert isinstance(error, Stop)
            elif epoch is None:
                assert isinstance(error, ValueError)
                assert "set sampler.epoch = 1 before fit" in str(error)
            else:
                assert error is None
                rows = chain(*job.allgather(list(chain(*(s[2] for s in net.seen)))))
                assert sorted(rows) == list(range(9))


@pytest.mark.parametrize("seed", seeds(24))
def test_predictions_are_in_the_order_of_rows(seed: int, folder: Any, job: Any) -> None:
    draw = random.Random(seed)
    rows = draw.randint(1, 30)
    data = NumberedRows(rows)
    if draw.random() < 0.5:
        loader: Any = torch.utils.data.DataLoader(data, draw.randint(1, rows))
    else:
        options = drawn_batches(draw, rows) | {"shuffle": draw.random() < 0.5}
        options.pop("drop_remainder", None)
        strategy = hs.MultiWorkerMirroredStrategy()
        loader = hst.GlobalBatchSampler(data, strategy=strategy, **options).loader()
    path = Path(folder, "predicted.h5") if draw.random() < 0.3 else None
    ordered = hsl.OrderedPredictions(path)
    trainer = quiet_trainer(ordered, folder=folder, **over_all(job))
    trainer.predict(RowsLearner(None), loader, return_predictions=False)
    if path is None:
        found = ordered.predictions
        row, x, half = found["row"], *found["parts"]
    else:
        assert ordered.predictions is None
        with h5py.File(path) as file:
            names = "row", "parts/0", "parts/1"
            row, x, half = (file[name][:] for name in names)
    numbers = np.arange(rows)
    np.testing.assert_array_equal(row, numbers)
    np.testing.assert_array_equal(half, numbers * 0.5)
    np.testing.assert_array_equal(x, torch.stack([data[n][1][:2] for n in numbers]))


def test_predictions_of_other_shapes_are_refused(folder: Any, job: Any) -> None:
    net = RowsLearner(None)
    net.predict_step = lambda batch: batch[1].sum()
    loader = torch.utils.data.DataLoader(NumberedRows(2 * job.size), 1)
    trainer = quiet_trainer(hsl.OrderedPredictions(), folder=folder, **over_all(job))
    error = outcome(trainer.predict, net, loader)
    assert isinstance(error, ValueError)
    assert "expected predictions of the 1 rows" in str(error)


@pytest.mark.parametrize("seed", range(2))
def test_a_signal_to_one_rank_ends_all(seed: int, folder: Any, job: Any) -> None:
    """All ranks save the same step once, and a new Trainer continues to the end."""
    draw = random.Random(seed)
    rows, size, who = draw.randint(8, 20), 3, draw.randrange(job.size)
    stop = draw.randint(1, 2 * -(-rows // size) - 1)

    class Signals(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if job.rank == who and trainer.global_step == stop - 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    weights = []
    with hs.MultiWorkerMirroredStrategy() as strategy:
        for callbacks in ([], [Signals()], []):
            net = RowsLearner(strategy)
            saving = hsl.PreemptionCheckpoint(folder)
            sampler = hst.GlobalBatchSampler(
                NumberedRows(rows), size, strategy, shuffle=True
            )
            trainer = quiet_trainer(
                saving, *callbacks, folder=folder, max_epochs=2, **over_all(job)
            )
            before = signal.getsignal(signal.SIGUSR1)
            code = None
            try:
                trainer.fit(net, sampler.loader(), ckpt_path=saving.newest)
            except SystemExit as exit_of_all:
                code = exit_of_all.code
            assert signal.getsignal(signal.SIGUSR1) == before
            if callbacks:
                assert code == 42
                last = stop % -(-rows // size) == 0
                assert job.allgather(trainer.global_step) == [stop + last] * job.size
                assert os.listdir(folder) == ["hpc_ckpt_1.ckpt"]
            else:
                assert code is None
                weights.append(net.line.weight.detach().numpy().copy())
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-12)
