"""Networks that the ranks of a replica divide, compared with plain PyTorch.

The programs are complete: a U-Net with a spectral layer on a field whose rows the ranks
divide, and a network whose hidden units the ranks divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.torch as hst
from tests.mpi.ranks.outcomes import assert_same_bits, outcome

NX, NY, CHANNELS, MODES = 24, 8, 3, 4
INPUTS, HIDDEN = 6, 7
SAMPLES, STEPS = 24, 20


class Whole:
    """Stands for `hst.inside` in one process, with plain PyTorch on whole fields."""

    @staticmethod
    def part(length: int) -> slice:
        return slice(length)

    @staticmethod
    def halo(x: torch.Tensor, dim: int, width: int) -> torch.Tensor:
        assert dim == 2
        return nn.functional.pad(x, (0, 0, width, width))

    @staticmethod
    def transpose(x: torch.Tensor, split: int, whole: int) -> torch.Tensor:
        del split, whole
        return x

    @staticmethod
    def sum(x: torch.Tensor) -> torch.Tensor:
        return x


def calls_of(strategy: Any) -> Any:
    """Return the calls in a replica, or for one process those on whole fields."""
    if strategy is None:
        return Whole

    class Calls:
        part = staticmethod(strategy.inside.part)
        halo = staticmethod(hst.inside.halo)
        transpose = staticmethod(hst.inside.transpose)
        sum = staticmethod(hst.inside.sum)

    return Calls


class Conv(nn.Conv2d):
    """A 3x3 convolution of a field whose rows the ranks divide, with zeros around."""

    def __init__(self, inputs: int, outputs: int, inside: Any) -> None:
        super().__init__(inputs, outputs, 3, padding=(0, 1))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.inside.halo(x, 2, 1))


class Spectral(nn.Module):
    """Multiplies modes of the field by weights, which the ranks divide along ky."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside
        whole = torch.randn(CHANNELS, CHANNELS, NX, MODES, 2) / CHANNELS
        self.weights = nn.Parameter(whole[:, :, :, inside.part(MODES)].contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(x, dim=3)[..., :MODES]
        modes = self.inside.transpose(modes, 2, 3)
        modes = torch.fft.fft(modes, dim=2)
        weights = torch.view_as_complex(self.weights)
        modes = torch.einsum("bixy,ioxy->boxy", modes, weights)
        modes = torch.fft.ifft(modes, dim=2)
        return torch.fft.irfft(self.inside.transpose(modes, 3, 2), n=NY, dim=3)


class UNet(nn.Module):
    """A U-Net of two levels, with a spectral layer."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside
        self.first = Conv(1, CHANNELS, inside)
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 2, stride=2)
        self.low = Conv(CHANNELS, CHANNELS, inside)
        self.up = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, stride=2)
        self.join = Conv(2 * CHANNELS, CHANNELS, inside)
        self.spectral = Spectral(inside)
        self.last = nn.Conv2d(CHANNELS, 1, 1)
        height = torch.linspace(0, 1, NX)[inside.part(NX), None]
        self.register_buffer("height", height.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(self.first(x) + self.height)
        b = self.up(torch.tanh(self.low(torch.tanh(self.down(a)))))
        c = torch.tanh(self.join(torch.cat([a, b], 1)))
        return self.last(c + self.spectral(c))

    def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the sum over the whole field, from this rank's rows."""
        return self.inside.sum((self(x) - y).square().sum() / (NX * NY))


class Perceptron(nn.Module):
    """Two layers; the ranks divide the hidden units between them."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside
        one, two = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 1)
        own = inside.part(HIDDEN)
        self.scale = nn.Parameter(torch.ones(INPUTS))
        self.columns = nn.Parameter(one.weight.data[own].clone())
        self.offsets = nn.Parameter(one.bias.data[own].clone())
        self.rows = nn.Parameter(two.weight.data[:, own].clone())
        self.last = nn.Parameter(two.bias.data.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh((x * self.scale) @ self.columns.T + self.offsets)
        return self.inside.sum(hidden @ self.rows.T) + self.last

    def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of a batch, which all ranks of the replica compute."""
        return (self(x) - y).square().sum()


class Normalized(nn.Module):
    """Normalizes a field whose rows the ranks divide, between two convolutions."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside
        self.first = Conv(1, CHANNELS, inside)
        self.norm: nn.Module = nn.BatchNorm2d(CHANNELS)
        self.last = Conv(CHANNELS, 1, inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))

    def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the sum over the whole field, from this rank's rows."""
        return self.inside.sum((self(x) - y).square().sum() / (NX * NY))


def field_data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    fields = rng.standard_normal((SAMPLES, 1, NX, NY))
    return fields, np.cumsum(fields, 2) / 8


def table_data() -> tuple[Any, Any]:
    x = np.random.default_rng(1).standard_normal((SAMPLES, INPUTS))
    return x, np.sin(x.sum(1, keepdims=True))


SPLITS: dict[Any, dict[str, int]] = {
    UNet: {"spectral.weights": 3, "height": 0},
    Perceptron: {"columns": 0, "offsets": 0, "rows": 1},
    Normalized: {},
}


def dataset(kind: Any) -> Any:
    if kind is not Perceptron:
        return hs.Dataset(field_data(), 12, shuffle=True, seed=1).split(1)
    # On 3 replicas, one has no rows of a batch.
    return hs.Dataset(table_data(), 4, shuffle=True, seed=1)


def tensors(batch: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(values)) for values in batch]


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def strategies(job: Any) -> Iterator[dict[int, Any]]:
    """Yield strategies by the number of ranks of their replicas."""
    # Each rank has whole pairs of rows, which the second level of the U-Net adds. At
    # most four replicas, because torch has no FFT of a batch without rows.
    counts = [n for n in range(2, NX) if job.size % n == NX % (2 * n) == 0]
    counts = [n for n in counts if job.size // n <= 4]
    with ExitStack() as stack:
        yield {
            count: stack.enter_context(
                hs.MultiWorkerMirroredStrategy(ranks_per_replica=count)
            )
            for count in counts or [1]
        }


@pytest.fixture
def divided(strategies: dict[int, Any]) -> Any:
    """Return the strategy with the most ranks in a replica."""
    return strategies[max(strategies)]


def alone(kind: Any) -> list[Any]:
    """Return losses, and each parameter and gradient, of one process."""
    torch.manual_seed(0)
    net = kind(Whole)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    data, losses = dataset(kind), []
    while len(losses) < STEPS:
        for x, y in map(tensors, data):
            sgd.zero_grad()
            loss = net.loss_sum(x, y) / len(x)
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    found = [(p.grad.numpy(), p.detach().numpy()) for p in net.parameters()]
    return [losses[:STEPS], *found, *statistics(net)]


def trained(
    strategy: Any, kind: Any, op: str = "mean", steps: int = STEPS
) -> list[Any]:
    """Return the same of a strategy's ranks; divided parameters are assembled."""
    torch.manual_seed(0)
    net = kind(calls_of(strategy))
    if kind is Normalized:
        hst.SyncBatchNorm.convert(net, strategy, divided=True)
    hst.replicate(net, strategy, split=SPLITS[kind], op=op)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    data = strategy.experimental_distribute_dataset(dataset(kind))

    def step(batch: Any) -> Any:
        x, y = tensors(batch)
        loss = hst.global_mean(net.loss_sum(x, y), len(x))
        loss.backward()
        return loss.detach()

    losses: list[float] = []
    while len(losses) < steps:
        for batch in data:
            sgd.zero_grad()
            loss = strategy.run(step, args=(batch,))
            sgd.step()
            losses.append(float(strategy.experimental_local_results(loss)[0]))
    found = []
    for name, parameter in net.named_parameters():
        pair = parameter.grad.numpy(), parameter.detach().numpy()
        axis = SPLITS[kind].get(name)
        if axis is not None:
            pair = tuple(strategy.inside.gather(array, axis) for array in pair)
        found.append(pair)
    return [losses[:steps], *found, *statistics(net)]


def statistics(net: Any) -> list[Any]:
    """Return the running mean and variance of a network's normalization, if any."""
    norm = getattr(net, "norm", None)
    return [] if norm is None else [(norm.running_mean, norm.running_var)]


@pytest.mark.parametrize(
    ("kind", "op"),
    [(UNet, "mean"), (Perceptron, "mean"), (Perceptron, "sum"), (Normalized, "mean")],
)
def test_training_is_that_of_one_process(
    job: Any, strategies: dict[int, Any], kind: Any, op: str
) -> None:
    expected = alone(kind)
    for strategy in strategies.values():
        found = trained(strategy, kind, op)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
        assert_same_bits(job, *(np.asarray(a) for pair in found[1:] for a in pair))


class Continued:
    """A training of the divided network with AdamW, saved and restored."""

    def __init__(self, strategy: Any) -> None:
        torch.manual_seed(0)
        self.strategy = strategy
        self.net = Perceptron(calls_of(strategy))
        hst.replicate(self.net, strategy, split=SPLITS[Perceptron])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.state = hst.state(self.net, self.optimizer)

    def train(self, steps: range) -> None:
        x, y = (torch.from_numpy(a) for a in table_data())
        count = self.strategy.num_replicas_in_sync
        for number in steps:
            rows = slice(self.strategy.replica_id + number % 2, SAMPLES, count)
            self.optimizer.zero_grad()
            self.strategy.run(self._step, args=(x[rows], y[rows]))
            self.optimizer.step()

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        hst.global_mean(self.net.loss_sum(x, y), len(x)).backward()

    def values(self) -> list[Any]:
        """Return all parameters and slots, whole."""
        found = []
        for name, parameter in self.net.named_parameters():
            slots = self.optimizer.state.get(parameter, {})
            moments = [slots[k] for k in ("exp_avg", "exp_avg_sq") if k in slots]
            axis = SPLITS[Perceptron].get(name)
            for tensor in (parameter.detach(), *moments):
                array = tensor.numpy()
                if axis is not None:
                    array = self.strategy.inside.gather(array, axis)
                found.append(array.copy())
        return found


def test_a_saved_state_is_restored_on_any_number_of_ranks_per_replica(
    job: Any, strategies: dict[int, Any], folder: Path
) -> None:
    with hs.MultiWorkerMirroredStrategy() as plain:
        everyone = {**strategies, 1: plain}
        for count, strategy in everyone.items():
            first = Continued(strategy)
            first.train(range(5))
            path = hs.CheckpointManager(folder / str(count), **first.state).save(5)
            saved = first.values()
            drawn = torch.rand(2).tolist()
            for other in everyone.values():
                second = Continued(other)
                second.train(range(job.size % 2))
                torch.manual_seed(9)
                hs.CheckpointManager(folder, **second.state).restore(path)
                assert torch.rand(2).tolist() == drawn
                for one, two in zip(second.values(), saved, strict=True):
                    assert one.tobytes() == two.tobytes()
                second.train(range(5, 9))
                other.check_divergence()
                straight = Continued(other)
                straight.train(range(9))
                for one, two in zip(second.values(), straight.values(), strict=True):
                    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)


def test_logical_replicas_have_the_same_bits_on_any_number_of_replicas(
    job: Any,
) -> None:
    """With one number of ranks per replica, as sums inside of a replica have."""
    for count in (1, 2):
        bits = []
        for ranks in range(count, min(job.size, 4 * count) + 1, count):
            part = job.Split(int(job.rank < ranks), job.rank)
            if job.rank < ranks:
                with hs.MultiWorkerMirroredStrategy(
                    comm=part, ranks_per_replica=count, logical_replicas=4
                ) as strategy:
                    losses, *pairs = trained(strategy, UNet, steps=4)
                    arrays = [np.array(losses), *(a for pair in pairs for a in pair)]
                    bits.append(b"".join(array.tobytes() for array in arrays))
            part.Free()
        assert len(set(bits)) <= 1


def test_values_that_a_normalization_does_not_know_as_divided_are_errors(
    divided: Any,
) -> None:
    if divided.inside.size == 1:
        return
    net = hst.SyncBatchNorm.convert(nn.BatchNorm1d(2), divided)
    own = torch.full((3, 2), float(divided.inside.position))
    error = outcome(divided.run, net, args=(own,))
    assert isinstance(error, hs.CollectiveError), error
    count = divided.inside.size
    with hs.MultiWorkerMirroredStrategy(
        ranks_per_replica=count, logical_replicas=12
    ) as logical:
        error = outcome(hst.SyncBatchNorm.convert, net, logical, divided=True)
        assert isinstance(error, NotImplementedError), error


def error_of(strategy: Any, backward: Callable[[], Any]) -> Any:
    """Return the error of a backward, which is raised on all ranks."""
    error = outcome(backward)
    assert error is not None
    # Calls of the strategy work again.
    assert strategy.inside.sum(np.int64(1)) == strategy.inside.size
    return error


def test_a_forgotten_sum_or_mean_is_an_error(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    net = hst.replicate(nn.Linear(2, 1), divided)
    own = torch.full((3, 2), float(divided.inside.position))

    def partial_loss() -> None:
        hst.global_mean(net(own).sum(), 3).backward()

    def partial_count() -> None:
        loss_sum = hst.inside.sum(net(own).sum(), inside=divided.inside)
        hst.global_mean(loss_sum, 3 + divided.inside.position).backward()

    for forgotten in (partial_loss, partial_count):
        error = error_of(divided, forgotten)
        assert isinstance(error, hs.CollectiveError), error
        assert "global_mean" in str(error)
        assert "strategy.inside.sum" in str(error)

    def no_mean() -> None:
        hst.inside.sum(net(own).sum(), inside=divided.inside).backward()

    error = error_of(divided, no_mean)
    assert isinstance(error, ValueError), error
    assert "hst.global_mean" in str(error)
    with hst.no_sync(net):
        error = error_of(divided, no_mean)
        assert isinstance(error, ValueError), error


def test_a_forgotten_split_is_an_error(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    torch.manual_seed(divided.inside.position)
    error = outcome(hst.replicate, nn.Linear(2, 1), divided)
    assert isinstance(error, hs.CollectiveError), error
    assert "of weight, bias in replicate" in str(error)
    assert "split" in str(error)
    cases = [
        (ValueError, "weights", {"weights": 0}),
        (ValueError, "0 <= split < 1", {"bias": 1}),
        (TypeError, "integer", {"weight": "rows"}),
        (TypeError, "dict", "weight"),
    ]
    rows = 1 if divided.inside.position else 5
    cases.append((ValueError, "strategy.inside.part", {"weight": 0, "bias": 0}))
    for kind, words, split in cases:
        net = nn.Linear(2, rows if isinstance(split, dict) and len(split) > 1 else 1)
        error = outcome(hst.replicate, net, divided, split=split)
        assert isinstance(error, kind), error
        assert words in str(error), error


def test_parts_that_several_ranks_have_are_refused(job: Any) -> None:
    """Only parts of all axes of a replica have gradients of their own."""
    if job.size < 4:
        return
    with hs.MultiWorkerMirroredStrategy(replica_shape={"x": 2, "y": 2}) as strategy:
        net = nn.Linear(3, 2)
        error = outcome(hst.replicate, net, strategy, split={"*": {"x": 0}})
        assert isinstance(error, ValueError), error
        assert "none along y" in str(error)
        torch.manual_seed(strategy.inside.position)
        net = nn.Linear(3, 2, bias=False)
        hst.replicate(net, strategy, split={"*": {"x": 0, "y": 1}})


def test_copies_that_drift_apart_are_found(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    torch.manual_seed(0)
    net = Perceptron(calls_of(divided))
    hst.replicate(net, divided, split=SPLITS[Perceptron])
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = tensors(table_data())

    def step() -> None:
        sgd.zero_grad()
        with divided.scope():
            hst.global_mean(net.loss_sum(x, y), len(x)).backward()
        # The norm of a part of the gradients differs between the ranks.
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        sgd.step()

    step()
    error = outcome(hst.state, net, sgd)
    assert isinstance(error, hs.CollectiveError), error
    assert "scale" in str(error), error
    error = error_of(divided, step)
    assert isinstance(error, hs.CollectiveError), error
    assert "scale" in str(error) or "global_mean" in str(error)


def test_buffers_that_differ_inside_are_found(divided: Any) -> None:
    if divided.inside.size == 1:
        return
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    hst.replicate(net, divided)
    own = torch.arange(6.0).reshape(3, 2) * (1 + divided.inside.position)

    def step() -> None:
        loss_sum = hst.inside.sum(net(own).sum(), inside=divided.inside)
        hst.global_mean(loss_sum, 3).backward()

    error = error_of(divided, step)
    assert isinstance(error, hs.CollectiveError), error
    assert "buffers" in str(error)


def test_a_backward_that_one_rank_leaves_out_is_an_error(job: Any) -> None:
    if job.size == 1:
        return
    comm = job.Dup()
    with hs.MultiWorkerMirroredStrategy(
        comm=comm, ranks_per_replica=job.size
    ) as strategy:
        torch.manual_seed(0)
        net = hst.replicate(nn.Linear(2, 1), strategy)

        def step(number: int) -> None:
            loss_sum = hst.inside.sum(net(torch.ones(3, 2)).sum())
            loss = hst.global_mean(loss_sum, 3)
            if (number, job.rank) != (1, job.size - 1):
                loss.backward()

        with strategy.scope():
            errors = (outcome(step, number) for number in range(3))
            found = next(error for error in errors if error is not None)
        assert isinstance(found, hs.CollectiveError), found
    comm.Free()


def test_gradients_of_some_ranks_and_of_several_backwards(
    strategies: dict[int, Any],
) -> None:
    """One rank uses a parameter, and gradients of three backwards add up."""
    for strategy in strategies.values():
        inside = strategy.inside
        torch.manual_seed(0)
        net = nn.ModuleDict(
            {
                "all": nn.Linear(2, 1),
                "one": nn.Linear(2, 1, bias=False),
                "rows": nn.Embedding(5, 1, sparse=True),
            }
        )
        net.register_parameter("part", nn.Parameter(torch.ones(4)[inside.part(4)]))
        x = torch.arange(8.0).reshape(4, 2)
        hst.replicate(net, strategy, split={"part": 0})

        def backward(
            x: Any = x, net: Any = net, strategy: Any = strategy, inside: Any = inside
        ) -> None:
            rows = inside.part(4)
            own = net["all"](x[rows]).sum() + (net.part * x[rows, 0]).sum()
            own = own + net["rows"](torch.arange(4)[rows]).sum()
            if inside.position == inside.size - 1:
                own = own + net["one"](x).sum()
            total = hst.inside.sum(own, inside=inside)
            # Replica r has r + 1 equal samples.
            number = strategy.replica_id + 1
            hst.global_mean(total * number, number, strategy=strategy).backward()

        for times in (1, 2):
            backward()
            for name in ("all", "one"):
                slope = torch.tensor([[12.0 * times, 16.0 * times]])
                torch.testing.assert_close(net[name].weight.grad, slope)
            expected = times * x[inside.part(4), 0]
            torch.testing.assert_close(net.part.grad, expected)
            rows_grad = net["rows"].weight.grad.to_dense()[:, 0].tolist()
            assert rows_grad == pytest.approx([times] * 4 + [0])
        with hst.no_sync(net):
            backward()
        backward()
        slope = torch.tensor([[48.0, 64.0]])
        torch.testing.assert_close(net["all"].weight.grad, slope)
        torch.testing.assert_close(net.part.grad, 4 * x[inside.part(4), 0])
        [slope] = torch.autograd.grad(
            hst.global_mean(
                hst.inside.sum(net.part.square().sum(), inside=inside),
                1,
                strategy=strategy,
            ),
            net.part,
        )
        # The derivative of this replica's share of the mean; `op` is the mean.
        torch.testing.assert_close(slope, 2 * net.part.detach())
