"""The rules of the optimizers in NumPy, and a model for comparisons with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat import optimizers
from tests.mpi.ranks.regression import FEATURES, X, Y, gradients

Array = Any

Rule = Callable[[str, Array, list[Array], int], Array]


def sgd(rate: float, momentum: float = 0.0) -> Rule:
    def step(name: str, x: Array, past: list[Array], t: int) -> Array:
        powers = momentum ** np.arange(len(past))[::-1]
        return x - rate * sum(p * g for p, g in zip(powers, past, strict=True))

    return step


def adagrad(rate: float, initial: float, epsilon: float) -> Rule:
    def step(name: str, x: Array, past: list[Array], t: int) -> Array:
        total = initial + sum(g**2 for g in past)
        return x - rate * past[-1] / (np.sqrt(total) + epsilon)

    return step


def _moments(past: list[Array], beta_1: float, beta_2: float) -> tuple[Array, Array]:
    """Return the bias-corrected moments by their definition as weighted means."""
    t = len(past)
    w1 = (1 - beta_1) * beta_1 ** np.arange(t)[::-1]
    w2 = (1 - beta_2) * beta_2 ** np.arange(t)[::-1]
    m = sum(w * g for w, g in zip(w1, past, strict=True)) / (1 - beta_1**t)
    v = sum(w * g**2 for w, g in zip(w2, past, strict=True)) / (1 - beta_2**t)
    return m, v


def adam(rate: float, decay: float = 0.0, exempt: str = "-") -> Rule:
    def step(name: str, x: Array, past: list[Array], t: int) -> Array:
        m, v = _moments(past, 0.9, 0.999)
        decayed = 0.0 if exempt in name else decay
        return x - rate * (m / (np.sqrt(v) + 1e-7) + decayed * x)

    return step


def adam_with_schedule(schedule: Callable[[int], float]) -> Rule:
    def step(name: str, x: Array, past: list[Array], t: int) -> Array:
        m, v = _moments(past, 0.8, 0.95)
        return x - schedule(t - 1) * m / (np.sqrt(v) + 1e-7)

    return step


def lamb(rate: float, decay: float, exempt: str) -> Rule:
    def step(name: str, x: Array, past: list[Array], t: int) -> Array:
        m, v = _moments(past, 0.9, 0.999)
        direction = m / (np.sqrt(v) + 1e-6)
        if exempt in name:
            return x - rate * direction
        direction = direction + decay * x
        norm = np.sqrt((x**2).sum())
        trust = norm / np.sqrt((direction**2).sum()) if norm else 1.0
        return x - rate * trust * direction

    return step


def slow(step: int) -> float:
    return 0.1 / (1 + step)


RULES: dict[str, tuple[Callable[..., Any], Rule]] = {
    "sgd": (lambda **o: optimizers.SGD(0.05, **o), sgd(0.05)),
    "momentum": (lambda **o: optimizers.SGD(0.02, 0.9, **o), sgd(0.02, 0.9)),
    "adagrad": (
        lambda **o: optimizers.Adagrad(0.1, 0.2, 1e-6, **o),
        adagrad(0.1, 0.2, 1e-6),
    ),
    "adam": (lambda **o: optimizers.Adam(0.02, **o), adam(0.02)),
    "adam-schedule": (
        lambda **o: optimizers.Adam(slow, 0.8, 0.95, **o),
        adam_with_schedule(slow),
    ),
    "adamw": (
        lambda **o: optimizers.AdamW(0.02, 0.1, exclude=["bias"], **o),
        adam(0.02, 0.1, "bias"),
    ),
    "lamb": (
        lambda **o: optimizers.LAMB(0.05, 0.1, exclude=["^bi"], **o),
        lamb(0.05, 0.1, "bias"),
    ),
}


def initial(dtype: Any) -> dict[str, Array]:
    """Return first values; ``offset`` is 0, and therefore its norm is 0."""
    rng = np.random.default_rng(5)
    values = {
        "weights": rng.standard_normal((FEATURES, 3)),
        "bias": rng.standard_normal(3),
        "offset": np.zeros(3),
    }
    return {name: value.astype(dtype) for name, value in values.items()}


def gradients_of(values: Any, x: Array, y: Array, size: int) -> list[Array]:
    weights, bias, offset = values
    _, first, second = gradients(weights, bias + offset, x, y, size)
    return [first, second, second]


class Model:
    """The model on replicas, trained by an optimizer of the library."""

    def __init__(self, strategy: Any, make: Callable[..., Any], dtype: Any) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.variables = [
                hs.Variable(value, name=name) for name, value in initial(dtype).items()
            ]
            self.optimizer = make()

    def step(self, batch: Any, size: int) -> bool:
        """Make one call of apply_gradients, and return its result."""

        def apply(batch: Any) -> Any:
            values = [variable.value() for variable in self.variables]
            found = gradients_of(values, *batch, size)
            return self.optimizer.apply_gradients(
                zip(found, self.variables, strict=True)
            )

        updated = self.strategy.run(apply, args=(batch,))
        return bool(self.strategy.local_value(updated))

    def bits(self) -> bytes:
        return b"".join(variable.component.tobytes() for variable in self.variables)

    def assert_close(self, values: dict[str, Array], **tolerance: float) -> None:
        for variable in self.variables:
            np.testing.assert_allclose(
                variable, values[variable.name], err_msg=variable.name, **tolerance
            )


def batches(strategy: Any, size: int, dtype: Any = np.float64) -> Iterator[Any]:
    """Yield ragged batches without end, each for this replica and for all replicas."""
    data = (X.astype(dtype), Y.astype(dtype))
    alone = hs.Dataset(data, size, shuffle=True, seed=1)
    shared = hs.Dataset(data, size, shuffle=True, seed=1)
    distributed = strategy.experimental_distribute_dataset(shared)
    while True:
        yield from zip(distributed, alone, strict=True)
