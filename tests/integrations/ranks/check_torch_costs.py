"""Global batches of PyTorch's datasets, divided between replicas by cost."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from hpcstrat.data.row_division import divide_by_cost
from tests.mpi.ranks.effort import examples
from tests.mpi.ranks.outcomes import assert_usable, outcome

NUM_GRAPHS = 60
SIZES = np.clip(np.random.default_rng(0).lognormal(3.0, 0.7, NUM_GRAPHS), 4, 90)
SIZES = SIZES.round().astype(int)


class Graphs:
    """Graphs of different numbers of atoms, with their numbers."""

    def __len__(self) -> int:
        return NUM_GRAPHS

    def __getitem__(self, index: int) -> Any:
        draw = np.random.default_rng(index)
        atoms = torch.from_numpy(draw.normal(size=(SIZES[index], 3)))
        return {"atoms": atoms, "energy": atoms.square().sum(), "number": index}


def joined(graphs: list[Any]) -> Any:
    """Return a batch of graphs, with all atoms in one tensor."""
    owner = [torch.full((len(g["atoms"]),), i) for i, g in enumerate(graphs)]
    return {
        "atoms": torch.cat([g["atoms"] for g in graphs]),
        "owner": torch.cat(owner),
        "energy": torch.stack([g["energy"] for g in graphs]),
        "number": [g["number"] for g in graphs],
    }


def _parts(job: Any, own: list[list[int]]) -> list[list[list[int]]]:
    """Return the rows of each replica, for each step."""
    return [list(parts) for parts in zip(*job.allgather(own), strict=True)]


GIVEN: dict[str, Any] = {
    "array": SIZES,
    "item": "size",
    "function": lambda graph: len(graph["atoms"]),
}


class WithSizes(Graphs):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {"size": int(SIZES[index])}


def test_global_batches_are_those_without_costs(strategy: Any, job: Any) -> None:
    draw = np.random.default_rng(4)
    for seed in range(examples(24)):
        options: dict[str, Any] = {"shuffle": bool(draw.integers(2)), "seed": seed}
        size: int | None = int(draw.integers(3, 30))
        by_cost: dict[str, Any] = {"equal_rows": bool(draw.integers(2))}
        if draw.integers(2):
            by_cost["max_cost"] = float(draw.integers(100, 700))
            size = None if draw.integers(2) else size
        costs = GIVEN[["array", "item", "function"][draw.integers(3)]]
        sampler = hst.GlobalBatchSampler(
            WithSizes(), size, strategy, costs=costs, **by_cost, **options
        )
        rows = hs.Dataset(np.arange(NUM_GRAPHS), **options)
        expected = rows.batch(size, costs=SIZES, **by_cost)
        batches = [batch.tolist() for batch in expected]
        steps = _parts(job, list(sampler))
        assert [sorted(chain(*step)) for step in steps] == list(map(sorted, batches))
        for step, batch in zip(steps, batches, strict=True):
            order, ends = divide_by_cost(
                SIZES[batch].astype(float), len(step), equal_rows=by_cost["equal_rows"]
            )
            parts = [order[a:b] for a, b in pairwise(ends)]
            assert step == [[batch[index] for index in part] for part in parts]
        # An iteration goes on where the program was.
        sampler.epoch = 0
        loader = sampler.loader(collate_fn=joined)
        at = int(draw.integers(1, len(batches)))
        for _, _batch in zip(range(at), loader, strict=False):
            pass
        state = sampler.state()
        assert state["global_position"] == len(list(chain(*batches[:at])))
        sampler.restore_state(state)
        assert _parts(job, [b["number"] for b in loader]) == steps[at:]


class Network(nn.Module):
    """Energies of graphs, as sums over their atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.double()

    def forward(self, batch: Any) -> Any:
        atoms = self.layers(batch["atoms"]).squeeze(1)
        return torch.zeros_like(batch["energy"]).index_add(0, batch["owner"], atoms)


@pytest.mark.parametrize("plain", [False, True])
def test_loss_and_gradients_are_those_of_the_global_batch(
    strategy: Any, plain: bool
) -> None:
    torch.manual_seed(1)
    whole = Network()
    model = hst.replicate(Network(), strategy)
    model.load_state_dict(whole.state_dict())
    sampler = hst.GlobalBatchSampler(
        Graphs(), 20, strategy, shuffle=True, seed=2, costs=SIZES
    )
    loader: Any = sampler.loader(collate_fn=joined)
    if plain:
        loader = DataLoader(Graphs(), batch_sampler=sampler, collate_fn=joined)
    expected = hs.Dataset(np.arange(NUM_GRAPHS), 20, shuffle=True, seed=2)
    graphs, counts = Graphs(), []
    for batch, rows in zip(loader, expected, strict=True):
        model.zero_grad()
        whole.zero_grad()
        errors = (model(batch) - batch["energy"]).square()
        loss = hst.global_mean(errors.sum(), len(errors), strategy=strategy)
        loss.backward()
        every = joined([graphs[int(row)] for row in rows])
        mean = (whole(every) - every["energy"]).square().mean()
        mean.backward()
        torch.testing.assert_close(loss, mean)
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        counts.append(len(errors))
    sizes = strategy.collectives.all_gather_object(counts, "counts")
    # The replicas have different numbers of rows in some step.
    steps = zip(*sizes, strict=True)
    assert len(sizes) == 1 or any(len(set(step)) > 1 for step in steps)


def test_predictions_of_tensors_are_in_the_order_of_the_rows(strategy: Any) -> None:
    torch.manual_seed(1)
    model = Network()
    sampler = hst.GlobalBatchSampler(Graphs(), 20, strategy, shuffle=True, costs=SIZES)
    like = torch.zeros((), dtype=torch.float64)
    writer = hs.data.PredictionWriter(strategy, NUM_GRAPHS, like)
    for batch in sampler.loader(collate_fn=joined):
        writer.add(batch["number"], model(batch).detach())
    whole = joined([Graphs()[index] for index in range(NUM_GRAPHS)])
    expected = model(whole).detach().numpy()
    np.testing.assert_allclose(writer.result(), expected, rtol=1e-12)


def test_wrong_costs_are_an_error_on_all_before_the_first_step(
    strategy: Any, job: Any
) -> None:
    costs = SIZES.astype(float)
    if job.rank == job.size - 1:
        costs[3] = np.nan
    sampler = hst.GlobalBatchSampler(Graphs(), 8, strategy, costs=costs)
    error = outcome(iter, sampler)
    assert isinstance(error, ValueError | hs.ReplicaError)
    assert "found nan for row 3" in str(error)
    sampler = hst.GlobalBatchSampler(Graphs(), None, strategy, costs=SIZES, max_cost=50)
    assert "at most max_cost=50" in str(outcome(iter, sampler))
    sampler = hst.GlobalBatchSampler(Graphs(), 1, strategy, costs=SIZES)
    error = outcome(iter, DataLoader(Graphs(), batch_sampler=sampler))
    assert isinstance(error, ValueError) == (job.size > 1)
    assert_usable(strategy, job)


def test_measured_costs_are_fitted_each_epoch(strategy: Any, job: Any) -> None:
    costs = hs.data.MeasuredCosts(SIZES)
    sampler = hst.GlobalBatchSampler(Graphs(), 20, strategy, shuffle=True, costs=costs)
    loader = sampler.loader(collate_fn=joined)
    for _ in range(3):
        steps = _parts(job, [batch["number"] for batch in loader])
        assert sorted(chain(*chain(*steps))) == list(range(NUM_GRAPHS))
    assert len(set(map(tuple, job.allgather(costs.coefficients.tolist())))) == 1
    assert (costs.coefficients < 1).all()  # seconds
