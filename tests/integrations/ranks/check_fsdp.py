"""FSDP2 over MPI: each way to use it trains with the same results as on gloo."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcstrat.integrations.torch.process_group import BACKEND

fsdp = pytest.importorskip("torch.distributed.fsdp")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    # In earlier versions, gloo has no reduce-scatter.
    pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="torch before 2.6"),
]
WIDTH, WORDS = 12, 7


class Net(nn.Module):
    """A model from words to words whose first and last layer share their weights."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        # Biases of 5 elements divide unevenly; with more ranks some parts are empty.
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
            for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, WORDS, bias=False)
        self.last.weight = self.words.weight
        self.recompute = recompute

    def forward(self, words: Any) -> Any:
        """Return scores for the word that follows each word."""
        found = self.words(words)
        for layer in self.layers:
            if self.recompute:
                found = found + torch.utils.checkpoint.checkpoint(
                    layer, found, use_reentrant=False
                )
            else:
                found = found + layer(found)
        return self.last(found)


def batches(job: Any) -> Any:
    """Return four batches of this rank."""
    generator = torch.Generator().manual_seed(job.rank)
    return torch.randint(0, WORDS, (4, 6, 3), generator=generator)


def options_of(way: str) -> dict[str, Any]:
    """Return the options of FSDP2 for a way to use it."""
    if way == "kept":
        return {"reshard_after_forward": False}
    if way == "half":
        halves = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        return {"mp_policy": fsdp.MixedPrecisionPolicy(**halves)}
    if way == "offloaded":
        return {"offload_policy": fsdp.CPUOffloadPolicy(pin_memory=False)}
    return {}


def divided(mesh: Any, way: str) -> Any:
    """Return a model whose weights are divided among the ranks of a mesh."""
    torch.manual_seed(0)
    net: Any = Net(recompute=way == "recomputed")
    if way != "half":
        net = net.double()
    if way == "frozen":
        net.layers[1].requires_grad_(False)
    options = {"mesh": mesh, **options_of(way)}
    for layer in net.layers if way != "whole" else ():
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(net, **options)
    if way == "prefetched":
        for one, two in itertools.pairwise(net.layers):
            one.set_modules_to_forward_prefetch([two])
            two.set_modules_to_backward_prefetch([one])
    return net


def trained(job: Any, mesh: Any, way: str) -> tuple[list[Any], list[Any]]:
    """Train on a mesh; return whole weights, and other numbers that must be equal."""
    net, told = divided(mesh, way), []
    model = torch.compile(net, backend="aot_eager") if way == "compiled" else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for number, words in enumerate(batches(job)):
        last = way != "added up" or number % 2 == 1
        net.set_requires_gradient_sync(last)
        if way == "gathered by hand":
            net.unshard(async_op=True).wait()
        found = model(words).flatten(0, 1)
        loss = nn.functional.cross_entropy(found, words.roll(1).flatten())
        loss.backward()
        told.append(loss.detach())
        if way == "clipped":
            norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            told.append(norm.full_tensor())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [weight.detach().full_tensor() for weight in net.parameters()], told


WAYS = (
    "by layers",
    "half",
    "prefetched",
    "added up",
    "clipped",
    "two dimensions",
    # These ways make the same calls of the backend in other orders.
    *(
        pytest.param(way, marks=pytest.mark.full)
        for way in (
            "whole",
            "kept",
            "offloaded",
            "frozen",
            "recomputed",
            "gathered by hand",
            "compiled",
        )
    ),
)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[Any]:
    """Make the default group of the job for the tests of this module."""
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND)
    yield dist.group.WORLD
    dist.destroy_process_group()


def mesh(job: Any, backend: str, way: str) -> Any:
    """Return a mesh whose groups use a backend."""
    from torch.distributed.device_mesh import DeviceMesh

    world = dist.new_group(backend=backend)
    if way != "two dimensions":
        return DeviceMesh.from_group(world, "cpu")
    alone = [dist.new_group([rank], backend=backend) for rank in range(job.size)]
    numbers = torch.arange(job.size).reshape(job.size, 1)
    names = "replicated", "divided"
    return DeviceMesh.from_group(
        [world, alone[job.rank]], "cpu", mesh=numbers, mesh_dim_names=names
    )


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_on_gloo(job: Any, way: str) -> None:
    weights, told = trained(job, mesh(job, BACKEND, way), way)
    expected, theirs = trained(job, mesh(job, "gloo", way), way)
    # Gloo adds the parts in another order.
    close = {"rtol": 1e-10, "atol": 1e-10}
    if way == "half":
        close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(weights, expected, **close)
    torch.testing.assert_close(told, theirs, **close)
    for weight in weights:
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight)
