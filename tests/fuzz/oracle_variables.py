"""The oracle of variables: a variable is the list of all replicas' copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fuzz.arithmetic import combine
from tests.fuzz.program import Op

if TYPE_CHECKING:
    from tests.fuzz.oracle import Oracle

__all__ = ["Copies"]

_CHANGES = {
    "assign": lambda old, new: np.array(new),
    "assign_add": lambda old, new: old + new,
    "assign_sub": lambda old, new: old - new,
}


class Copies:
    """The copies of a variable on all replicas."""

    def __init__(self, op: Op, oracle: Oracle) -> None:
        self._oracle = oracle
        self._how = op.aggregation or "none"
        self.on_write = op.sync != "on_read" or oracle.central
        start = op.start.value(0)
        self.parts = [np.array(start) for _ in range(oracle.size)]

    @property
    def value(self) -> Any:
        """Return the value of a variable whose copies are equal."""
        return self.parts[0]

    def set(self, value: Any) -> None:
        """Set all copies to a value."""
        self.parts = [np.array(value) for _ in self.parts]

    def _combined(self, parts: Sequence[Any]) -> Any:
        if self._how == "only_first_replica" or len(parts) == 1:
            return parts[0]
        return combine(self._how, parts)

    def _changed(self, method: str, old: Any, new: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(_CHANGES[method](old, new)).astype(old.dtype)

    def _require_aggregation(self) -> None:
        if self._how == "none" and len(self.parts) > 1:
            raise self._oracle.everywhere("ValueError")

    def update(self, method: str, parts: list[Any], failed: int | None) -> list[Any]:
        """Assign to the variable in replica context."""
        if self.on_write:
            self._require_aggregation()
            value = self._combined(parts)
            self.set(self._changed(method, self.value, value))
        else:
            for rank, part in enumerate(parts):
                if rank != failed:
                    old = self.parts[rank]
                    self.parts[rank] = self._changed(method, old, part)
        return [np.array(part) for part in self.parts]

    def assign(self, method: str, value: Any) -> None:
        """Assign to the variable outside of replica functions."""
        if self.on_write:
            self.set(self._changed(method, self.value, value))
            return
        adds = method != "assign"
        if self._how == "none" or (adds and self._how == "sum"):
            raise self._oracle.everywhere("ValueError")
        if self._how == "sum":
            self.restore(value)
        else:
            self.parts = [self._changed(method, part, value) for part in self.parts]

    def scatter(
        self, method: str, parts: list[tuple[Any, Any]], *, aggregated: bool
    ) -> list[Any]:
        """Change rows of the variable, by the slices of all replicas in turn."""
        if aggregated:
            self._require_aggregation()
        dtype = self.value.dtype
        if any(dtype.kind in "iu" and rows.dtype.kind == "f" for rows, _ in parts):
            raise self._oracle.everywhere("ValueError")
        divisor = 1
        if aggregated and len(parts) > 1:
            divisor = len(parts) if self._how == "mean" else 1
            parts = parts[:1] if self._how == "only_first_replica" else parts
        value = np.array(self.value)
        for rows, indices in parts:
            for row, index in zip(rows, indices, strict=True):
                if method == "scatter_update":
                    value[index] = row
                elif method == "scatter_max":
                    value[index] = np.maximum(value[index], row)
                else:
                    sign = -1 if method == "scatter_sub" else 1
                    value[index] += sign * (row / divisor if divisor > 1 else row)
        self.set(value)
        return [np.array(value) for _ in self.parts]

    def read(self) -> Any:
        """Read the variable outside of replica functions."""
        if self.on_write:
            return np.array(self.value)
        if self._how == "none":
            raise self._oracle.everywhere("ValueError")
        return np.array(self._combined(self.parts))

    def logical(self) -> Any:
        """Return the value that a checkpoint contains."""
        if not self.on_write and self._how == "none":
            return [np.array(part) for part in self.parts]
        return self.read()

    def restore(self, value: Any) -> None:
        """Set the copies from a checkpoint of any number of replicas."""
        size = len(self.parts)
        if isinstance(value, list):
            self.parts = value
        elif self.on_write or self._how != "sum":
            self.set(value)
        elif value.dtype.kind in "iu":
            whole, rest = np.divmod(value.astype(np.int64), size)
            self.parts = [
                np.asarray(whole + (rank < rest)).astype(value.dtype)
                for rank in range(size)
            ]
        else:
            share = np.asarray(value / size).astype(value.dtype)
            self.parts = [np.array(share) for _ in range(size)]
