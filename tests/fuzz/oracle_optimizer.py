"""The oracle of optimizers: combines gradients of replicas and calls, and updates."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fuzz.arithmetic import Rule, clip, combine, fitting
from tests.fuzz.program import Op

if TYPE_CHECKING:
    from tests.fuzz.oracle import Oracle

__all__ = ["Optimizing"]


class Optimizing:
    """An optimizer on all replicas.

    Accumulated gradients are kept combined over all replicas, so that they do not
    depend on the number of replicas at the time of the update.
    """

    def __init__(self, op: Op, oracle: Oracle) -> None:
        self._oracle = oracle
        options = dict(op.options)
        self._calls = options.pop("accumulate_steps", 1)
        self._limit = options.pop("clip_global_norm", None)
        self._how = options.pop("aggregation", "sum")
        self._fills = options.pop("missing_gradients", "error") == "zeros"
        self._rule = Rule(op.rule, options)
        self._built = bool(op.build)
        self.steps = self.skipped = self._done = self._ends = 0
        self._state: dict[str, Any] = {}
        # For each variable: the combined gradients so far, and the replicas that had a
        # gradient. After a restart, gradients from before count for all replicas.
        self._sums: dict[str, Any] = {}
        self._had: dict[str, set[int]] = {}
        # For each variable: the elements that have a gradient, if all were of rows.
        self._touched: dict[str, Any] = {}

    def saved(self) -> dict[str, Any]:
        """Return the state that a checkpoint contains."""
        kept = (self.steps, self._done, self._state, self._sums, self._had)
        return {"kept": copy.deepcopy(kept), "ends": self._ends}

    def form(self) -> list[Any]:
        """Return the names of the variables that have state."""
        some = {name: bool(had) for name, had in self._had.items()}
        return [self._built, list(self._state), list(self._sums), some]

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.steps, self._done, self._state, self._sums, had = saved["kept"]
        self._had = {
            n: set(range(self._oracle.size)) for n, some in had.items() if some
        }
        self._built, self._touched = False, {}

    def run_failed(self, entered: dict[str, Any]) -> None:
        """Record that the ``run`` of a call has failed on all replicas.

        Completed steps stay; from an accumulation, all replicas drop the calls of this
        run.
        """
        _, done, _, sums, had = entered["kept"]
        self._restart()
        if self._ends == entered["ends"]:
            self._done, self._sums, self._had = done, sums, had

    def _restart(self) -> None:
        self._done, self._sums, self._had, self._touched = 0, {}, {}, {}

    def meets(self) -> bool:
        """Return whether the replicas synchronize in the next call."""
        return not self._built or self._done + 1 >= self._calls

    def apply(self, op: Op, batches: Any, failed: int | None) -> list[bool]:
        """Do ``apply_gradients`` on all replicas, except one that has failed before."""
        size, variables = self._oracle.size, self._oracle.variables
        if op.fault:
            raise self._oracle.told(op.fault[1], "ValueError")
        self._built = True
        without, lacking = op.lacks or (None, 0)
        for index, (name, draw) in enumerate(zip(op.over, op.gradients, strict=True)):
            had = self._had.setdefault(name, set())
            if draw is None:
                continue
            like = variables[name].value
            given = [rank for rank in range(size) if rank != failed]
            if without == index and lacking % size in given:
                given.remove(lacking % size)
            had.update(given)
            gradients = [
                self._gradient(op, draw, rank, like, batches)
                if rank in given
                else np.zeros_like(like)
                for rank in range(size)
            ]
            touched = self._touched.setdefault(name, np.zeros(like.shape, bool))
            for rank in given:
                touched[list(op.rows[self._row_set(op, rank)]) if op.rows else ...] = (
                    True
                )
            total = combine(self._how, gradients)
            with np.errstate(all="ignore"):
                self._sums[name] = self._sums.get(name, np.zeros_like(total)) + total
        if failed is not None:
            return []
        self._done += 1
        if self._done < self._calls:
            return [False] * size
        try:
            return [self._step(list(self._had))] * size
        finally:
            self._restart()

    def _row_set(self, op: Op, rank: int) -> int:
        """Return which of the operation's tuples of rows a replica has."""
        return int((self._oracle.first + rank) % len(op.rows))

    def _gradient(self, op: Op, draw: Any, rank: int, like: Any, batches: Any) -> Any:
        gradient = draw.value(self._oracle.first + rank)
        if op.rows:
            dense = np.zeros_like(like)
            np.add.at(dense, list(op.rows[self._row_set(op, rank)]), gradient)
            gradient = dense
        if batches is not None:
            gradient = gradient * 0 + batches[rank].sum() / 4
        return fitting(gradient, like)

    def _present(self, names: list[str]) -> list[str]:
        """Return the variables that have a gradient, or raise if one is missing."""
        oracle, size = self._oracle, self._oracle.size
        counts = {name: len(self._had[name]) for name in names}
        empty = [r for r in range(size) if not any(r in self._had[n] for n in names)]
        if empty and not self._fills and len(empty) < size:
            raise oracle.told(empty[0], "ValueError")
        if any(0 < count < size for count in counts.values()) and not self._fills:
            raise oracle.everywhere("CollectiveError")
        present = [name for name in names if counts[name]]
        if not present:
            raise oracle.everywhere("ValueError")
        return present

    def _step(self, names: list[str]) -> bool:
        oracle, present = self._oracle, self._present(names)
        gradients = [self._sums[name] for name in present]
        if not all(np.isfinite(g).all() for g in gradients):
            self._ends += oracle.policy in ("raise", "skip")
            if oracle.policy == "raise":
                raise oracle.everywhere("NonFiniteError")
            if oracle.policy == "skip":
                self.skipped += 1
                return False
        if self._how == "mean":
            gradients = [fitting(g / self._calls, g) for g in gradients]
        if self._limit is not None:
            gradients = clip(gradients, self._limit)
        self.steps += 1
        self._ends += 1
        for name, gradient in zip(present, gradients, strict=True):
            variable = oracle.variables[name]
            if name not in self._state:
                self._state[name] = self._rule.start(variable.value)
            state = self._state[name]
            touched = self._touched.get(name, np.True_)
            new = self._rule.step(variable.value, gradient, state, self.steps, touched)
            variable.set(new)
        return True
