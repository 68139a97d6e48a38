"""``bench_step.py --device``: the overhead of the library in a GPU training step.

The program's own kernels are matrix products that take about two milliseconds, by
calibration, and whose results are not used; the gradients are allocated before. The
step of hpcstrat is ``strategy.run`` of these kernels, ``apply_gradients`` (sum over
replicas, stochastic gradient descent with momentum) and ``compute_average_loss``, and
``strategy.reduce`` of the loss, which is not read. The step by hand does the same in
CuPy, with each way to sum a buffer that works on this machine (``device_ways.py``).
Many steps are in flight at once, as in a loop that reads its loss now and then. The
overhead is

    time of a step / time of the kernels alone - 1

The overhead has two parts: kernels and copies that the sum and the update need in any
library, and time in which the GPU waits for the host. The overhead is measured for
several sizes of the gradients; the smallest size shows the second part. The host's time
of a step, which includes waiting for other ranks, is reported, too: it is hidden if it
is shorter than the kernels. All alternatives must end with equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from device_ways import Ways
from devices import Bench, Flight
from report import row, size_text

import hpcstrat as hs

__all__ = ["SECONDS", "SIZES", "measure_device"]

SIZES = [64 << 10, 1 << 20, 16 << 20, 100 << 20]
SECONDS = 4.0
ALONE = "kernels alone"
KERNEL_SECONDS = 2e-3
GOAL = 0.05
_ORDER = 1024
_ARRAYS = 32
_RATE, _MOMENTUM = 0.01, 0.9
_ROUNDS = 7
TOLERANCE = 1e-5

Call = Callable[[], Any]


class Kernels:
    """The program's own work on the GPU.

    Collective over all replicas, which all do the same number of products.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    """

    def __init__(self, bench: Bench):
        order = 16 if bench.smoke else _ORDER
        with bench.stream:
            self.arrays = [bench.cupy.ones((order, order), np.float32) for _ in "ab"]
            self.result = bench.cupy.empty((order, order), np.float32)
        self.matmul = bench.cupy.matmul
        self.count = 1
        if not bench.smoke:
            # Warm up, because the first call loads libraries, and the GPU clock rises
            # under load.
            bench.in_flight(self, 1e-3)
            seconds = bench.in_flight(self, 1e-3).device_seconds
            self.count = max(1, round(KERNEL_SECONDS / seconds))

    def __call__(self) -> None:
        """Start the matrix products on the GPU.

        Not collective.
        """
        for _ in range(self.count):
            self.matmul(*self.arrays, out=self.result)


class _Step:
    """A training step: preallocated gradients and losses, and a way to update weights.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    kernels : Kernels
        The program's own work.
    nbytes : int
        Size of all gradients in bytes.
    """

    def __init__(self, bench: Bench, kernels: Kernels, nbytes: int):
        self.bench, self.kernels = bench, kernels
        cupy, comm = bench.cupy, bench.comm
        length = max(nbytes // 4 // _ARRAYS, 1)
        with bench.stream:
            self.gradients = [
                cupy.full(length, (comm.rank + 1) / (index + 1), np.float32)
                for index in range(_ARRAYS)
            ]
            self.losses = cupy.full(16, comm.rank + 1, np.float32)
        self.num_global = 16 * comm.size
        self.loss: Any = None
        self.num_steps = 0


class Ours(_Step):
    """The step by hpcstrat; see `_Step` for the other parameters.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The strategy, whose transport sums the gradients.
    """

    def __init__(self, bench: Bench, kernels: Kernels, nbytes: int, strategy: Any):
        super().__init__(bench, kernels, nbytes)
        self.strategy = strategy
        with bench.stream, strategy.scope():
            self.variables = [
                hs.Variable(bench.cupy.zeros_like(gradient), name=f"parameter{index}")
                for index, gradient in enumerate(self.gradients)
            ]
            self.optimizer = hs.optimizers.SGD(_RATE, _MOMENTUM)

    def replica_step(self) -> Any:
        """Do the replica's part of a step, in replica context.

        Collective over all replicas.
        """
        self.kernels()
        pairs = zip(self.gradients, self.variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return hs.compute_average_loss(self.losses, global_batch_size=self.num_global)

    def __call__(self) -> None:
        """Do a step.

        Collective over all replicas.
        """
        losses = self.strategy.run(self.replica_step)
        self.loss = self.strategy.reduce("sum", losses, axis=None)
        self.num_steps += 1

    def weights(self) -> list[Any]:
        """Return the first weight of each array.

        Not collective.
        """
        return [float(variable.value().ravel()[0]) for variable in self.variables]


class ByHand(_Step):
    """The step by CuPy, as users write it; see `_Step` for the other parameters.

    Parameters
    ----------
    ways : Ways
        The ways to sum that work on this machine.
    name : str
        Name of the way that is used.
    """

    def __init__(
        self, bench: Bench, kernels: Kernels, nbytes: int, *, ways: Ways, name: str
    ):
        super().__init__(bench, kernels, nbytes)
        cupy = bench.cupy
        with bench.stream:
            self.values = [cupy.zeros_like(array) for array in self.gradients]
            self.velocities = [cupy.zeros_like(array) for array in self.gradients]
            size = sum(array.size for array in self.gradients) + 1
            packed, total = (cupy.empty(size, np.float32) for _ in range(2))
        self.packed = packed
        self.reduce = ways.flat(packed, total)[name]

    def __call__(self) -> None:
        """Do a step.

        Collective over all replicas.
        """
        cupy = self.bench.cupy
        self.kernels()
        loss = self.losses.sum(keepdims=True) / np.float32(self.num_global)
        flat = [array.ravel() for array in self.gradients]
        cupy.concatenate([*flat, loss], out=self.packed)
        total = self.reduce()
        start = 0
        for value, velocity in zip(self.values, self.velocities, strict=True):
            gradient = total[start : start + value.size].reshape(value.shape)
            start += value.size
            cupy.multiply(velocity, _MOMENTUM, out=velocity)
            cupy.subtract(velocity, _RATE * gradient, out=velocity)
            cupy.add(value, velocity, out=value)
        self.loss = total[-1:]
        self.num_steps += 1

    def weights(self) -> list[Any]:
        """Return the first weight of each array.

        Not collective.
        """
        return [float(value.ravel()[0]) for value in self.values]


def expected(ranks: int, steps: int) -> list[float]:
    """Return the weights after some steps, in double precision.

    Not collective.

    Parameters
    ----------
    ranks : int
        Number of replicas.
    steps : int
        Number of steps.

    Returns
    -------
    list of float
        The weight of each array.
    """
    value = velocity = 0.0
    for _ in range(steps):
        velocity = _MOMENTUM * velocity - _RATE * ranks * (ranks + 1) / 2
        value += velocity
    return [value / (index + 1) for index in range(_ARRAYS)]


def _require_right(name: str, step: Any) -> None:
    """Raise if the weights or the loss are wrong."""
    bench = step.bench
    ranks = bench.comm.size
    with bench.stream:
        found = step.weights()
        loss = float(bench.cupy.asnumpy(step.loss).ravel()[0])
    wanted = expected(ranks, step.num_steps)
    # The tolerance allows one float32 rounding error per step.
    np.testing.assert_allclose(
        found, wanted, rtol=TOLERANCE * max(step.num_steps, 10), err_msg=name
    )
    np.testing.assert_allclose(loss, (ranks + 1) / 2, rtol=TOLERANCE, err_msg=name)


def _one_size(
    bench: Bench, ways: Ways, kernels: Kernels, nbytes: int, seconds: float
) -> dict[str, list[Flight]]:
    """Return the results of several turns of steps, for each alternative."""
    steps: dict[str, Any] = {ALONE: kernels}
    for name, strategy in ways.strategies.items():
        steps[name] = Ours(bench, kernels, nbytes, strategy)
    for name in ways.flat(bench.cupy.empty(1), bench.cupy.empty(1)):
        steps[name] = ByHand(bench, kernels, nbytes, ways=ways, name=name)
    times = bench.measure(steps, 0, least=1)
    share = seconds / _ROUNDS / len(steps)
    found: dict[str, list[Flight]] = {name: [] for name in steps}
    for _ in range(1 if bench.smoke else _ROUNDS):
        for name, step in steps.items():
            longest = float(np.median(times[name]))
            most = max(3, int(share / longest))
            found[name].append(bench.in_flight(step, longest, most=most))
    for name, step in steps.items():
        if name != ALONE:
            _require_right(name, step)
    return found


def measure_device(bench: Bench, sizes: list[int], seconds: float) -> dict[str, Any]:
    """Measure all sizes, print the times, and write them.

    Collective over all replicas.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    sizes : list of int
        Sizes of the gradients in bytes.
    seconds : float
        Seconds of measurement for each size.

    Returns
    -------
    dict of str to ndarray of shape (turns,)
        Seconds of a step of the smallest size, for each alternative.
    """
    what = "training step on GPUs"
    hs.print_once(f"{what}, {bench.where()}")
    ways = Ways(bench, named=False)
    hs.print_once(ways.report())
    kernels = Kernels(bench)
    found: dict[int, dict[str, list[Flight]]] = {}
    for size in sizes:
        found[size] = _one_size(bench, ways, kernels, size, seconds)
        hs.print_once(_text(size, found[size]))
        bench.cupy.get_default_memory_pool().free_all_blocks()
    if bench.comm.rank == 0:
        rows = [
            {
                **row(what, name, bench.comm.size, size, [f.seconds for f in turns]),
                "in_flight": [asdict(flight) for flight in turns],
                "overhead": _median(turns) / _median(by_name[ALONE]) - 1,
            }
            for size, by_name in found.items()
            for name, turns in by_name.items()
        ]
        bench.write(
            "step",
            rows,
            transports=ways.transports,
            left_out=ways.left_out,
            products_of_a_step=kernels.count,
            goal_of_overhead=GOAL,
        )
    ways.close()
    return {
        name: np.array([flight.seconds for flight in turns])
        for name, turns in found[sizes[0]].items()
    }


def _median(turns: list[Flight]) -> float:
    return float(np.median([flight.seconds for flight in turns]))


def _text(size: int, found: dict[str, list[Flight]]) -> str:
    alone = _median(found[ALONE])
    width = max(map(len, found))
    lines = [
        f"\n{size_text(size)} of gradients in {_ARRAYS} arrays; each step: ms, "
        f"overhead (goal {GOAL:.0%}), host ms"
    ]
    lines += [
        f"{name.ljust(width)}  {_median(turns) * 1e3:9.3f}  "
        f"{_median(turns) / alone - 1:+8.1%}  "
        f"{float(np.median([f.host_seconds for f in turns])) * 1e3:9.3f}"
        for name, turns in found.items()
    ]
    return "\n".join(lines)
