"""Measure training on graphs of different size, divided by count and by cost.

Run it on two ranks of a quiet machine with two cores::

    mpirun --bind-to core -n 2 python benchmarks/bench_costs.py --json FILE

Graphs have 10 to 200 atoms, from a log-normal distribution. A small PyTorch network
computes a message for each edge, and sums messages over each graph. Both rivals train
on the same global batches, in turn, in one process: the first divides them into equal
numbers of graphs, the second by the number of edges. A step includes the loader, the
sum of gradients and the optimizer. The figure is the total time of the first over that
of the second. The planning time is that of one batch, without training.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
import torch
from mpi4py import MPI
from paired import measure_paired
from report import write_json
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from hpcstrat.data.row_division import divide_by_cost

NUM_GRAPHS = 4096
NEIGHBORS = 24


class Graphs:
    """Graphs with an edge from each atom to some atoms, or to all of them."""

    def __init__(self, *, complete: bool) -> None:
        draw = np.random.default_rng(0)
        atoms = np.clip(draw.lognormal(np.log(45), 0.7, NUM_GRAPHS), 10, 200)
        self.atoms = atoms.round().astype(int)
        self.complete = complete
        self.edges = self.atoms * (self.atoms if complete else NEIGHBORS)

    def __len__(self) -> int:
        return NUM_GRAPHS

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(int(self.edges[index]), 4, generator=generator)


def joined(graphs: list[Any]) -> Any:
    """Return the edges of all graphs, and the graph of each edge."""
    counts = torch.tensor([len(graph) for graph in graphs])
    return torch.cat(graphs), torch.arange(len(graphs)).repeat_interleave(counts)


class Network(nn.Module):
    """Energies of graphs: sums of functions of their edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1)
        )

    def forward(self, edges: Any, owner: Any, count: int) -> Any:
        messages = self.layers(edges).squeeze(1)
        return torch.zeros(count).index_add(0, owner, messages)


def trainer(
    strategy: Any, graphs: Graphs, batch: int, costs: Any
) -> Callable[[], object]:
    """Return a function that makes the next training step."""
    torch.manual_seed(1)
    model = hst.replicate(Network(), strategy)
    optimizer = torch.optim.Adam(model.parameters())
    sampler = hst.GlobalBatchSampler(graphs, batch, strategy, shuffle=True, costs=costs)

    def batches() -> Iterator[Any]:
        loader = sampler.loader(collate_fn=joined)
        return itertools.chain.from_iterable(itertools.repeat(loader))

    source = batches()

    def step() -> None:
        edges, owner = next(source)
        count = int(owner[-1]) + 1 if len(owner) else 0
        optimizer.zero_grad()
        errors = model(edges, owner, count) - 1
        hst.global_mean(errors.square().sum(), count).backward()
        optimizer.step()

    return step


def ratios(edges: Any, count: int, batch: int) -> tuple[float, float, float]:
    """Return largest over mean cost, by count and by cost, and seconds of a plan."""
    order = np.random.default_rng(2).permutation(len(edges))
    equal, divided, seconds = [], [], []
    for start in range(0, len(edges) - batch + 1, batch):
        costs = edges[order[start : start + batch]].astype(float)
        begin = time.perf_counter()
        rows, ends = divide_by_cost(costs, count)
        seconds.append(time.perf_counter() - begin)
        sums = np.add.reduceat(costs[rows], ends[:-1])
        divided.append(sums.max() / sums.mean())
        sums = costs.reshape(count, -1).sum(axis=1)
        equal.append(sums.max() / sums.mean())
    return float(np.mean(equal)), float(np.max(divided)), float(np.median(seconds))


@click.command()
@click.option("--seconds", default=20.0, help="Time for each case.")
@click.option("--json", "path", help="File for the results.")
def main(seconds: float, path: str | None) -> None:
    """Print the results of all cases."""
    torch.set_num_threads(1)
    strategy = hs.MultiWorkerMirroredStrategy()
    count, rows = strategy.num_replicas_in_sync, []
    comm = strategy.topology.replica_comm
    for complete, each in itertools.product([False, True], [4, 8, 16, 32]):
        graphs = Graphs(complete=complete)
        steps = {
            "count": trainer(strategy, graphs, each * count, None),
            "cost": trainer(strategy, graphs, each * count, graphs.edges),
        }
        found = measure_paired(comm, MPI, steps, seconds)
        # All steps count, because a choice of quiet ones would prefer short steps.
        totals = {name: float(s.seconds.mean()) for name, s in found.items()}
        foreign = np.median([s.foreign for s in found.values()])
        equal, divided, plan = ratios(graphs.edges, count, each * count)
        rows.append(
            {
                "edges": "all pairs" if complete else f"{NEIGHBORS} per atom",
                "graphs_per_replica": each,
                "steps": len(found["cost"].seconds),
                "share_of_other_programs": float(foreign),
                "step_seconds_by_count": totals["count"],
                "step_seconds_by_cost": totals["cost"],
                "speedup": totals["count"] / totals["cost"],
                "mean_of_largest_over_mean_by_count": equal,
                "most_of_largest_over_mean_by_cost": divided,
                "plan_seconds": plan,
            }
        )
        hs.print_once(rows[-1])
    graphs = Graphs(complete=False)
    names = "mean_by_count", "most_by_cost", "plan_seconds"
    eight = dict(zip(names, ratios(graphs.atoms, 8, 256), strict=True))
    hs.print_once("8 replicas, 32 graphs each:", eight)
    if path and strategy.replica_id == 0:
        write_json(path, MPI, rows, plan_of_8_replicas=eight)


if __name__ == "__main__":
    main()
