"""Batches and checkpoints of PyTorch programs, on other numbers of replicas."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.conftest import strategies
from tests.mpi.ranks.outcomes import assert_usable, outcome

__all__ = ["strategies"]

NUM_ROWS = 21
BATCH = 5  # The last batch has one row, so most replicas have none.


class Rows:
    """A map-style dataset of rows with their targets."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(-1, 1, 4, dtype=torch.float64) * (index + 1)
        return {
            "x": x,
            "y": torch.tensor(float(index % 3)).double(),
            "name": str(index),
        }


def _sampler(strategy: Any, **options: Any) -> Any:
    options = {"shuffle": True, "seed": 3, **options}
    return hst.GlobalBatchSampler(Rows(), BATCH, strategy, **options)


def _global_batches(job: Any, own: list[list[int]]) -> list[list[int]]:
    """Return the rows of each step, of all ranks in order."""
    parts = job.allgather(own)
    assert len({len(part) for part in parts}) == 1
    return [list(chain(*step)) for step in zip(*parts, strict=True)]


def test_batches_are_those_of_one_process(strategy: Any, job: Any) -> None:
    data = hs.Dataset(np.arange(NUM_ROWS), BATCH, shuffle=True, seed=3)
    sampler = _sampler(strategy)
    assert len(sampler) == len(sampler.loader()) == 5
    for epoch in range(2):
        assert sampler.epoch == epoch
        found = _global_batches(job, list(sampler))
        assert found == [batch.tolist() for batch in data]
        assert sorted(chain(*found)) == list(range(NUM_ROWS))
    whole = _global_batches(job, list(_sampler(strategy, drop_remainder=True)))
    assert list(map(len, whole)) == [BATCH] * 4


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_stands_where_the_program_is(
    strategy: Any, job: Any, workers: int
) -> None:
    if workers and job.size != 2:
        pytest.skip("workers take seconds, and do the same on any number of ranks")
    data = hs.Dataset(np.arange(NUM_ROWS), BATCH, shuffle=True, seed=3)
    expected = [batch.tolist() for _ in range(2) for batch in data]
    options = {"num_workers": workers}
    if workers:
        options |= {"multiprocessing_context": "forkserver", "persistent_workers": True}
    sampler = _sampler(strategy)
    loader = sampler.loader(**options)
    own, states = [], [sampler.state()]
    for _ in range(2):
        for batch in loader:
            assert batch["x"].shape == (len(batch["name"]), 4)
            own.append([int(name) for name in batch["name"]])
            states.append(sampler.state())
    assert _global_batches(job, own) == expected
    assert states[3]["global_position"] == 3 * BATCH
    # Restore in the middle of an epoch, and at its end.
    for at in (3, 5, 7):
        sampler.restore_state(states[at])
        rest = [[int(name) for name in batch["name"]] for batch in loader]
        assert _global_batches(job, rest) == expected[at : 5 if at <= 5 else 10]
    # A loader that was left early is not continued.
    sampler.epoch = 0
    next(iter(loader))
    assert len(list(loader)) == 5
    assert sampler.epoch == 2


def test_a_variable_of_the_program_is_no_loader_that_reads(strategy: Any) -> None:
    sampler = _sampler(strategy, drop_remainder=True)
    loader = sampler.loader()
    assert len(list(sampler)) == len(loader)
    # Only this program has read these batches, in a frame with a variable `loader`.
    for _ in sampler:
        pass
    assert sampler.state()["epoch"] == 2


def test_plain_loaders_say_what_they_cannot(strategy: Any, job: Any) -> None:
    sampler = _sampler(strategy)
    error = outcome(iter, DataLoader(Rows(), batch_sampler=sampler))
    assert isinstance(error, ValueError) == (job.size > 1)
    assert error is None or "sampler.loader()" in str(error)
    sampler = _sampler(strategy, drop_remainder=True)
    for _ in DataLoader(Rows(), batch_sampler=sampler):
        pass
    assert sampler.state()["epoch"] == 1
    other = _sampler(strategy, seed=4)
    assert "shuffle_seed 4" in str(
        outcome(other.check_state, _sampler(strategy).state())
    )
    assert_usable(strategy, job)
    if job.size != 2:
        return
    ahead = DataLoader(
        Rows(),
        batch_sampler=sampler,
        num_workers=1,
        multiprocessing_context="forkserver",
    )
    iter(ahead)
    assert "reads ahead" in str(outcome(sampler.state))


class _Training:
    """A training with a model, an optimizer and other objects with state."""

    def __init__(self, strategy: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.strategy = strategy
        self.model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1))
        self.model.append(nn.Linear(1, 1)).double()
        self.model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        hst.replicate(self.model, strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.sampler = _sampler(strategy)

    def manager(self, folder: Path) -> Any:
        parts = self.optimizer, self.scheduler, self.scaler
        state = hst.state(self.model, *parts)
        return hs.CheckpointManager(folder, **state, data=self.sampler)

    def steps(self, count: int) -> list[float]:
        losses = []
        while True:
            for batch in self.sampler.loader():
                self.optimizer.zero_grad()
                errors = self.model(batch["x"]).squeeze(1) - batch["y"]
                loss = hst.global_mean(
                    errors.square().sum(), len(batch["y"]), strategy=self.strategy
                )
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.model.seen += 1
                losses.append(loss.item())
                if len(losses) == count:
                    return losses


def test_saved_on_two_goes_on_on_three_as_one_process(
    strategies: dict[int, Any], job: Any, folder: Path
) -> None:
    saver, goer = min(2, job.size), job.size
    alone = _Training(hs.get_strategy(), 0)
    whole = alone.steps(8)
    if saver in strategies:
        training = _Training(strategies[saver], strategies[saver].replica_id)
        manager = training.manager(folder)
        assert training.steps(4) == pytest.approx(whole[:4], abs=1e-12)
        manager.save(4)
    job.Barrier()
    restored = _Training(strategies[goer], 9)
    places = [p.data_ptr() for p in restored.model.parameters()]
    manager = restored.manager(folder)
    assert manager.restore_or_initialize() == 4
    assert places == [p.data_ptr() for p in restored.model.parameters()]
    assert restored.model.seen == 4
    assert restored.steps(4) == pytest.approx(whole[4:], abs=1e-12)
    for own, one in zip(
        restored.model.parameters(), alone.model.parameters(), strict=True
    ):
        torch.testing.assert_close(own, one, rtol=1e-12, atol=1e-12)
    assert restored.scheduler.get_last_lr() == alone.scheduler.get_last_lr()
    assert restored.scaler.get_scale() == alone.scaler.get_scale() > 8
    strategies[goer].check_equal(
        [restored.model.state_dict(), restored.optimizer.state_dict()["state"]]
    )
    # Restore into existing slots, and again after further steps.
    manager.restore()
    assert restored.steps(4) == pytest.approx(whole[4:], abs=1e-12)


def test_tied_moved_and_half_parameters_are_saved(strategy: Any, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    manager = hs.CheckpointManager(
        folder, **hst.state(hst.replicate(model, strategy), optimizer)
    )
    model(torch.ones(2, 3).bfloat16()).sum().backward()
    optimizer.step()
    # Move a parameter to other memory.
    model[0].weight.data = model[0].weight.data.clone()
    before = [
        model[0].weight.clone(),
        optimizer.state[model[0].weight]["momentum_buffer"].clone(),
    ]
    manager.save(1)
    for tensor in (
        model[0].weight.data,
        optimizer.state[model[0].weight]["momentum_buffer"],
    ):
        tensor.zero_()
    manager.restore()
    after = [model[0].weight, optimizer.state[model[0].weight]["momentum_buffer"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    optimizer.state.clear()
    manager.restore()
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype is torch.bfloat16


def _lbfgs(strategy: Any, seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    hst.replicate(model, strategy)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=3, history_size=4)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(x) - x.prod(1, keepdim=True) - 1).square().mean()
        loss.backward()
        return loss

    return model, optimizer, closure


def test_lbfgs_goes_on_from_its_history(strategy: Any, folder: Path) -> None:
    model, optimizer, closure = _lbfgs(strategy, 1)
    manager = hs.CheckpointManager(folder, **hst.state(model, optimizer))
    optimizer.step(closure)
    manager.save(1)
    expected = [optimizer.step(closure).item() for _ in range(3)]
    # Restore into an optimizer with more history, and into one without steps.
    manager.restore()
    assert [optimizer.step(closure).item() for _ in range(3)] == expected
    model, optimizer, closure = _lbfgs(strategy, 2)
    manager = hs.CheckpointManager(folder, **hst.state(model, optimizer))
    manager.restore()
    assert [optimizer.step(closure).item() for _ in range(3)] == expected
    strategy.check_equal(model.state_dict())


class _WithTensor:
    """A scheduler whose state cannot be saved."""

    def state_dict(self) -> Any:
        return {"rates": [torch.ones(2)]}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def test_state_that_cannot_be_saved_is_found_before_a_save(
    strategy: Any, job: Any, folder: Path
) -> None:
    model = hst.replicate(nn.Linear(2, 1), strategy)
    error = outcome(hst.state, model, None, _WithTensor())
    assert isinstance(error, ValueError)
    assert "plain state of 'scheduler'" in str(error)
    error = outcome(lambda: hs.CheckpointManager(folder, mine=_WithTensor()))
    assert isinstance(error, ValueError)
    assert "plain state of 'mine'" in str(error)
    assert_usable(strategy, job)


def test_a_model_that_was_not_replicated_is_told_so(job: Any, folder: Path) -> None:
    model = nn.Linear(2, 1)
    error = outcome(lambda: hs.CheckpointManager(folder, **hst.state(model)))
    assert isinstance(error, RuntimeError) == (job.size > 1)
    assert job.size == 1 or "torch.replicate(model, strategy)" in str(error)


def test_weights_that_come_to_differ_are_named(job: Any) -> None:
    with hs.MultiWorkerMirroredStrategy() as strategy:
        model = hst.replicate(nn.Linear(3, 2), strategy)
        kept = hst.state(model)
        strategy.check_divergence()
        with torch.no_grad():
            model.weight[1, 1] += strategy.replica_id
        error = outcome(strategy.check_divergence)
        assert isinstance(error, hs.DivergenceError) == (job.size > 1)
        assert job.size == 1 or "torch.replicate(model, strategy)" in str(error)
        assert error is None or error.variable == "weight"
        assert list(kept) == ["model", "generators", "torch"]


def test_tensors_in_another_order_are_refused_on_all(strategy: Any, job: Any) -> None:
    last = strategy.num_replicas_in_sync - 1
    model = nn.Conv2d(3, 4, 3)
    if strategy.replica_id == last:
        model.to(memory_format=torch.channels_last)
    error = outcome(hst.state, model if not last else hst.replicate(model, strategy))
    assert isinstance(error, ValueError)
    assert "contiguous" in str(error)
    assert_usable(strategy, job)


def test_momentum_of_sparse_gradients_is_saved_and_was_not_there_before(
    strategy: Any, folder: Path
) -> None:
    """The momentum is a sparse tensor, which an earlier checkpoint does not have."""
    model = torch.nn.Embedding(5, 2, sparse=True)
    model = hst.replicate(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    manager = hs.CheckpointManager(folder, **hst.state(model, optimizer))

    def train(rows: list[int]) -> Any:
        optimizer.zero_grad()
        model(torch.tensor(rows)).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    played = []
    for step, rows in enumerate([[1, 3], [3, strategy.replica_id]]):
        path = manager.save(step)
        played.append((path, rows, train(rows)))
    for path, rows, wanted in played:
        manager.restore(path)
        torch.testing.assert_close(train(rows), wanted)
    strategy.check_equal(model.weight.detach())
