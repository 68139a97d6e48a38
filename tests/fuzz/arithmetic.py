"""Sums and update rules in plain NumPy, from the definitions in books and papers.

This module imports nothing of hpcstrat, so that its results are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Rule", "clip", "combine", "fitting", "over_axis"]


def combine(op: str, parts: Sequence[Any]) -> Any:
    """Return the sum, mean, max or min of the replicas' arrays, in their order."""
    dtype = parts[0].dtype
    if op in ("max", "min"):
        return getattr(np, f"{op}imum").reduce(parts)
    if op == "mean" and dtype.kind in "iu":
        whole = np.sum([part.astype(np.int64) for part in parts], axis=0)
        return np.asarray(whole / len(parts), np.float64)
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    total = parts[0].astype(wide)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = total + part.astype(wide)
        if op == "mean":
            total = total / len(parts)
        return np.asarray(total).astype(dtype)


def over_axis(op: str, parts: Sequence[Any], axis: int) -> Any:
    """Return the sum or mean over replicas and an axis, weighting elements equally."""
    dtype = parts[0].dtype
    rows = np.concatenate(parts, axis=axis)
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    with np.errstate(all="ignore"):
        if op == "sum":
            return np.asarray(rows.sum(axis=axis, dtype=wide)).astype(dtype)
        wide = np.dtype(np.float64) if dtype.kind in "iu" else wide
        total = np.asarray(rows.sum(axis=axis, dtype=wide))
        count = rows.shape[axis]
        mean = total / count if count else np.full(total.shape, np.nan, wide)
    return np.asarray(mean).astype(dtype if dtype == np.float16 else wide)


def fitting(value: Any, like: Any) -> Any:
    """Return a value, converted to the type of another value."""
    return np.asarray(value).astype(like.dtype)


def clip(gradients: Sequence[Any], limit: float) -> list[Any]:
    """Scale gradients so that their global norm is within a limit."""
    wide = [
        np.asarray(g, np.complex128 if g.dtype.kind == "c" else float)
        for g in gradients
    ]
    norm = float(np.sqrt(sum(float(np.sum(np.abs(g) ** 2)) for g in wide)))
    if norm <= limit:
        return list(gradients)
    factor = limit / norm if np.isfinite(norm) else np.nan
    return [fitting(g * factor, old) for g, old in zip(wide, gradients, strict=True)]


class Rule:
    """An update rule, and its state for a variable."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self._kind = kind
        self._options = options

    def start(self, value: Any) -> dict[str, Any]:
        """Return the state before the first step."""
        wide = np.float64 if value.dtype != np.float64 else value.dtype
        zeros = np.zeros(value.shape, wide)
        first = self._options.get("initial_accumulator_value", 0.1)
        return {"m": zeros, "v": zeros, "s": zeros + first}

    def step(
        self,
        value: Any,
        gradient: Any,
        state: dict[str, Any],
        t: int,
        touched: Any = np.True_,
    ) -> Any:
        """Return the new value, and replace the state.

        Where ``touched`` is false, the gradient had no row.
        """
        x, g = np.asarray(value, np.float64), np.asarray(gradient, np.float64)
        rate = self._options["learning_rate"]
        if self._kind == "SGD":
            moved = self._momentum(g, state, rate)
        elif self._kind == "Adagrad":
            # Rows without a gradient do not change, even where their state is NaN.
            state["s"] = np.where(touched, state["s"] + g**2, state["s"])
            moved = np.where(touched, -rate * g / (np.sqrt(state["s"]) + 1e-7), 0.0)
        else:
            moved = self._adam(x, g, state, t)
        return fitting(x + moved, value)

    def _momentum(self, g: Any, state: dict[str, Any], rate: float) -> Any:
        m = self._options.get("momentum", 0.0)
        if not m:
            return -rate * g
        state["m"] = m * state["m"] - rate * g
        if self._options.get("nesterov"):
            return m * state["m"] - rate * g
        return state["m"]

    def _adam(self, x: Any, g: Any, state: dict[str, Any], t: int) -> Any:
        rate = self._options["learning_rate"]
        usual = {"AdamW": 0.004, "LAMB": 0.01}.get(self._kind, 0.0)
        decay = self._options.get("weight_decay", usual)
        state["m"] = 0.9 * state["m"] + (1 - 0.9) * g
        state["v"] = 0.999 * state["v"] + (1 - 0.999) * g**2
        m, v = state["m"] / (1 - 0.9**t), state["v"] / (1 - 0.999**t)
        if self._kind != "LAMB":
            moved = -rate * m / (np.sqrt(v) + 1e-7)
            return moved - rate * decay * x
        u = m / (np.sqrt(v) + 1e-6) + decay * x
        norms = np.linalg.norm(x), np.linalg.norm(u)
        ratio = norms[0] / norms[1] if all(norms) else 1.0
        return -rate * ratio * u
