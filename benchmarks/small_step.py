"""Measure the library's overhead in a step: ``run`` and one update of small arrays.

The gradients are computed before the timed steps. The step by hand packs them into one
buffer for one ``Allreduce``, and updates each array from its part of the buffer. The
step of hpcstrat is ``strategy.run`` of a function that calls ``apply_gradients``, with
two update rules. The first rule is known to be elementwise, so that hpcstrat updates
small variables together. The second rule is not known to be elementwise, so that
hpcstrat calls it for each variable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from timing import measure_for

import hpcstrat as hs

__all__ = ["BY_ARRAY", "BY_HAND", "OURS", "measure_small"]

RATE = 0.01
OURS, BY_ARRAY, BY_HAND = "hpcstrat", "hpcstrat, array by array", "mpi4py"

Array = np.ndarray[Any, Any]


class RuleByArray(hs.optimizers.SGD):
    """Gradient descent by a program's own rule, which is called for each variable."""

    def update(self, step: Any, gradient: Array, value: Array, *state: Array) -> None:
        super().update(step, gradient, value, *state)


class ByHand:
    """The training step by hand on mpi4py."""

    def __init__(self, strategy: Any, values: list[Array], gradients: list[Array]):
        self.comm = strategy.topology.replica_comm
        self.in_place = strategy.topology.mpi.IN_PLACE
        self.values, self.gradients = [array.copy() for array in values], gradients
        self.packed = np.empty(sum(array.size for array in values), np.float32)
        self.views = np.split(self.packed, len(values))

    def __call__(self) -> None:
        """Sum the gradients, and update the values; collective over all replicas."""
        for view, gradient in zip(self.views, self.gradients, strict=True):
            np.copyto(view, gradient)
        self.comm.Allreduce(self.in_place, self.packed)
        for gradient, value in zip(self.views, self.values, strict=True):
            np.multiply(gradient, np.float32(-RATE), out=gradient)
            np.add(value, gradient, out=value)


def measure_small(
    strategy: hs.MultiWorkerMirroredStrategy,
    seconds: float,
    *,
    num_arrays: int = 20,
    elements: int = 64,
) -> dict[str, Any]:
    """Time the small steps by `timing.measure`; collective over all replicas."""
    draw = np.random.default_rng(3)
    values, gradients = (
        [draw.standard_normal(elements, np.float32) for _ in range(num_arrays)]
        for _ in range(2)
    )
    kept = []

    def ours(kind: Any) -> Any:
        with strategy.scope():
            optimizer = kind(RATE)
            variables = [
                hs.Variable(value, name=f"small{index}")
                for index, value in enumerate(values)
            ]
        kept.append(variables)

        def step() -> None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        return lambda: strategy.run(step)

    by_hand = ByHand(strategy, values, gradients)
    calls = {
        OURS: ours(hs.optimizers.SGD),
        BY_ARRAY: ours(RuleByArray),
        BY_HAND: by_hand,
    }
    topology = strategy.topology
    times = measure_for(topology.replica_comm, topology.mpi, calls, seconds, least=50)
    for variables in kept:
        for variable, expected in zip(variables, by_hand.values, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-4, atol=1e-4)
    return times
