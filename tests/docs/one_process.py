"""The guides' recipes as programs of one process, without a strategy.

These programs read the same global batches as the recipes, and compute without ranks:
in NumPy, or with the models, gradients and optimizers of PyTorch, JAX and Keras.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.docs.page import numbers_of

__all__ = ["ONE_PROCESS"]

# Set the backend before any test of this process imports Keras.
os.environ.setdefault("KERAS_BACKEND", "torch")
BATCH = 64


def _fit(
    data: Any, *, shuffle: bool, epochs: int, rate: float, momentum: float = 0.0
) -> tuple[Any, float]:
    """Return weights and last loss of a linear fit by gradient descent."""
    x, y = data
    weights, velocity, loss = np.zeros(x.shape[1]), np.zeros(x.shape[1]), 0.0
    batches = hs.Dataset(data, batch_size=BATCH, shuffle=shuffle)
    for _ in range(epochs):
        for x, y in batches:
            error = x @ weights - y
            velocity = momentum * velocity - rate * (2 * x.T @ error / BATCH)
            weights += velocity
            loss = float(np.sum(error**2) / BATCH)
    return weights, loss


def _data(rows: int, dtype: Any = np.float64) -> tuple[Any, Any]:
    x = np.random.default_rng(1).normal(size=(rows, 8)).astype(dtype)
    return x, x.sum(axis=1)


def _coming_from(*, shuffle: bool = True, epochs: int = 2) -> dict[str, Any]:
    weights, loss = _fit(_data(1000), shuffle=shuffle, epochs=epochs, rate=0.1)
    return {"weights": weights, "loss": loss}


def _counted() -> dict[str, Any]:
    numbers = np.random.default_rng(0).normal(size=100)
    return {"total": np.histogram(numbers, np.linspace(-3.0, 3.0, 7))[0]}


def _best_model() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 20))
    y = x[:, 0] + rng.normal(size=240)
    weights, best, kept = np.zeros(20), np.inf, np.zeros(20)
    epoch, without = -1, 0
    while without < 3:
        epoch += 1
        for start in range(0, 80, 20):
            some, wanted = x[start : start + 20], y[start : start + 20]
            weights = weights - 0.02 * 2 * some.T @ (some @ weights - wanted) / 20
        error = float(np.mean((x[80:] @ weights - y[80:]) ** 2))
        without = 0 if error < best else without + 1
        if error < best:
            best, kept = error, weights
    return {"weights": kept, "best": best, "float(epoch)": float(epoch)}


def _learning_rate() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 16)) * np.geomspace(1, 4, 16)
    y = x @ rng.normal(size=16)
    weights, losses, smooth = np.zeros(16), [], None
    rates = np.geomspace(1e-5, 1.0, 60)
    batches = hs.Dataset((x, y), batch_size=32, shuffle=True, seed=1)
    for rate, (some, wanted) in zip(rates, batches, strict=False):
        error = some @ weights - wanted
        weights = weights - rate * 2 * some.T @ error / 32
        loss = np.mean(error**2)
        smooth = loss if smooth is None else 0.7 * smooth + 0.3 * loss
        losses.append(float(smooth))
        if smooth > 4 * min(losses):
            break
    slopes = np.gradient(np.log(losses), np.log(rates[: len(losses)]))
    chosen = float(rates[np.argmin(slopes)] / 2)
    return {"chosen": chosen, "float(len(losses))": float(len(losses))}


def _training() -> dict[str, Any]:
    x, _ = _data(1000)
    data = x, x @ np.arange(8.0)
    weights, loss = _fit(data, shuffle=True, epochs=10, rate=0.05, momentum=0.9)
    return {"weights": weights, "seen": 10 * 1000, "loss": loss}


def _heat() -> dict[str, Any]:
    heat = 100 * np.eye(10, 8)
    for _ in range(40):
        padded = np.pad(heat, 1)
        around = padded[:-2, 1:-1] + padded[2:, 1:-1]
        around = around + padded[1:-1, :-2] + padded[1:-1, 2:]
        heat = heat + 0.2 * (around - 4 * heat)
    return {"heat": heat}


def _predictions() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(103, 4))
    found = x @ np.array([1, 1, 1, 0.5])
    return {"predictions": found, "error": np.abs(found - x.sum(axis=1)).mean()}


def _preemption() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(400, 8))
    weights, _ = _fit((x, x.sum(axis=1)), shuffle=True, epochs=3, rate=0.1)
    return {"weights": weights}


def _readme() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(4000, 8))
    data = x, x @ np.arange(8.0)
    # The page's program has half the gradient, and twice the rate.
    weights, _ = _fit(data, shuffle=False, epochs=1, rate=0.05, momentum=0.5)
    return {"weights.numpy()": weights}


def _torch(rows: int, batch: int, epochs: int, momentum: float) -> dict[str, Any]:
    """Train with torch alone, from the start values of replica 0."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    loss = torch.zeros(())
    data = hs.Dataset(_data(rows, np.float32), batch_size=batch, shuffle=True)
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            errors = model(torch.tensor(x)).squeeze(1) - torch.tensor(y)
            loss = errors.square().mean()
            loss.backward()
            optimizer.step()
    return {
        "torch model.state_dict()": model.state_dict(),
        "torch loss.detach()": loss.detach(),
    }


def _horovod() -> dict[str, Any]:
    """Train with torch alone on the rows of all ranks in each step."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.zeros(())
    # Without shuffling, the ranks' rows of a step together are consecutive rows.
    for x, y in 2 * list(hs.Dataset(_data(960, np.float32), batch_size=96)):
        optimizer.zero_grad()
        errors = model(torch.tensor(x)).squeeze(1) - torch.tensor(y)
        loss = errors.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
    return {"torch model.state_dict()": model.state_dict(), "torch loss": loss.detach()}


def _jax() -> dict[str, Any]:
    """Train with JAX's gradients, and momentum."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ weights - y) ** 2)

    weights = velocity = jnp.zeros(8)
    data = hs.Dataset(_data(50, np.float32), batch_size=16, shuffle=True)
    for _ in range(3):
        for x, y in data:
            value, gradient = jax.value_and_grad(loss)(weights, x, y)
            velocity = 0.9 * velocity + gradient
            weights = weights - 0.1 * velocity
    return {"jax weights": weights, "jax value": value}


def _keras() -> dict[str, Any]:
    """Train with Keras alone, on batches in the order of the page."""

    import keras

    keras.utils.set_random_seed(0)
    x, y = _data(50, np.float32)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    data, losses = hs.Dataset((x, y[:, None]), batch_size=16, shuffle=True), []
    with warnings.catch_warnings():
        # Ignore NumPy's deprecation warning about Keras's own arrays.
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(3):
            for batch in data:
                model.train_on_batch(*batch)
            losses.append(model.test_on_batch(x, y[:, None]))
        prediction = model.predict_on_batch(x)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, y, 16, 3, 0, shuffle=False).history
    return {
        "keras prediction": prediction,
        "keras losses": losses,
        "keras in_scope": history["loss"],
    }


def _mpi4jax() -> dict[str, Any]:
    """Fit by gradient descent with JAX's gradients."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.sum((x @ weights - y) ** 2) / BATCH

    weights, value = jnp.zeros(8), jnp.zeros(())
    data = hs.Dataset(_data(1000, np.float32), batch_size=BATCH, shuffle=True)
    for _ in range(2):
        for x, y in data:
            value, gradient = jax.value_and_grad(loss)(weights, x, y)
            weights = weights - 0.1 * gradient
    return {"jax weights": weights, "jax value": value}


_RECIPES: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {
    ("README.md", ""): _readme,
    ("coming-from/chainermn.md", ""): _coming_from,
    ("coming-from/horovod.md", ""): _coming_from,
    ("coming-from/horovod.md", "torch"): _horovod,
    ("coming-from/mpi4jax.md", "jax"): _mpi4jax,
    ("coming-from/tf-distribute.md", ""): lambda: _coming_from(shuffle=False, epochs=1),
    ("coming-from/torch-ddp.md", ""): _coming_from,
    ("coming-from/torch-ddp.md", "torch"): lambda: _torch(1000, BATCH, 2, 0.0),
    ("recipes.md", ""): _counted,
    ("user-guide/recipes/best-model.md", ""): _best_model,
    ("user-guide/recipes/learning-rate.md", ""): _learning_rate,
    ("user-guide/predictions.md", ""): _predictions,
    ("user-guide/preemption.md", ""): _preemption,
    ("user-guide/torch-jax.md", "torch"): lambda: _torch(50, 16, 3, 0.9),
    ("user-guide/torch-jax.md", "jax"): _jax,
    ("user-guide/keras.md", "keras"): _keras,
    ("user-guide/training.md", ""): _training,
    ("user-guide/simulations.md", ""): _heat,
}


def _numbers(compute: Callable[[], dict[str, Any]]) -> dict[str, list[float]]:
    return {name: numbers_of(value) for name, value in compute().items()}


ONE_PROCESS: dict[tuple[str, str], Callable[[], dict[str, list[float]]]] = {
    key: lambda compute=compute: _numbers(compute)  # type: ignore[misc]
    for key, compute in _RECIPES.items()
}
"""By page and word of its blocks: what is compared, computed in one process."""
