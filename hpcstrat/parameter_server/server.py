"""A rank that holds variables, and does what others ask for, one after the other.

So an update of one shard is whole or not there, whatever the number of writers, and the
updates of one rank are made in the order in which it has sent them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.arrays.casting import quietly
from hpcstrat.arrays.indexed_slices import IndexedSlices
from hpcstrat.arrays.row_updates import apply_at
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.parameters import Step
from hpcstrat.parameter_server.handles import error_bytes
from hpcstrat.parameter_server.mailbox import REPLY, Mailbox
from hpcstrat.parameter_server.memory import Memory, Place
from hpcstrat.typing import Array

__all__ = ["VariableServer"]

_OPERATIONS = {"assign_add": np.add, "assign_sub": np.subtract}


class _Shard:
    """A variable, or some of its rows, and the state of optimizers beside it."""

    __slots__ = ("array", "free", "name", "place", "slots", "steps", "version")

    def __init__(
        self, memory: Memory, name: str, shape: tuple[int, ...], dtype: Any
    ) -> None:
        self.name = name
        self.array, self.version, self.place, self.free = memory.allocate(shape, dtype)
        # By optimizer and kind; and the number of steps, by optimizer.
        self.slots: dict[tuple[int, str], Array] = {}
        self.steps: dict[int, int] = {}

    def update(self, change: Callable[[], None]) -> None:
        """Change the array while readers of this node look away."""
        self.version[0] += 1
        try:
            change()
        finally:
            self.version[0] += 1


class VariableServer:
    """Serves until all who run the ``programs`` have ended.

    ``client`` is the rank that an update came from: what it counts of them is told to
    it in shared memory, or when it asks.
    """

    def __init__(self, mailbox: Mailbox, programs: int) -> None:
        self._mailbox, self._bells = mailbox, mailbox.bells
        self._programs = programs
        place = mailbox.bells.place(mailbox.rank)
        assert place is not None
        self._applied, self._failed = (
            mailbox.bells.applied[place],
            mailbox.bells.failed[place],
        )
        self._memory = Memory()
        self._shards: dict[int, _Shard] = {}
        self._rules: dict[int, Any] = {}
        # Of optimizers, the steps made before what was restored.
        self._begun: dict[int, int] = {}
        self._errors: dict[int, bytes] = {}
        self._answers: dict[str, Callable[..., Any]] = {
            "create": self._create,
            "read": self._read,
            "read_rows": self._read_rows,
            "slot": self._slot,
            "stateful": self._stateful,
        }
        self._updates: dict[str, Callable[..., None]] = {
            "assign": self._assign,
            "assign_add": self._assign,
            "assign_sub": self._assign,
            "scatter": self._scatter,
            "rule": self._rule,
            "steps": self._take_steps,
            "set_slot": self._set_slot,
            "restored": self._restored,
            "build": self._build,
            "forget_state": self._forget_state,
            "delete": self._delete,
        }

    def serve(self) -> bool:
        """Serve; return whether strategies were closed, rather than left."""
        closes = True
        while True:
            client, (kind, *rest) = self._mailbox.next(lambda: "a request")
            update = self._updates.get(kind)
            if update is not None:
                self._apply(client, update, kind, rest)
            elif kind == "end":
                closes = closes and rest[0]
                self._mailbox.lost.update(rest[1])
                self._programs -= 1
                if self._programs == 0:
                    return closes
            else:
                self._answer(client, kind, rest)

    def _apply(self, client: int, update: Any, kind: str, rest: Any) -> None:
        try:
            update(kind, *rest)
        except Exception as error:
            # The first; it is raised where the client waits for its updates.
            if client not in self._errors:
                self._errors[client] = error_bytes(error)
            self._failed[client] += 1
        self._applied[client] += 1
        self._bells.ring(client)

    def _answer(self, client: int, kind: str, rest: Any) -> None:
        answer: tuple[bool, Any]
        if kind == "flush":
            # After all that this client has sent before; with its first error.
            error = self._errors.pop(client, None)
            answer = error is None, error
        else:
            try:
                answer = True, self._answers[kind](*rest)
            except Exception as error:
                answer = False, error_bytes(error)
        self._mailbox.send(client, answer, REPLY)

    def _create(
        self, number: int, name: str, shape: tuple[int, ...], dtype: Any, value: Any
    ) -> Place:
        """Make a shard of an array, of what a function makes here, or of zeros."""
        shard = _Shard(self._memory, name, shape, dtype)
        try:
            if isinstance(value, bytes):
                pickle.loads(value)(shard.array)
            elif value is not None:
                shard.array[...] = value
        except BaseException:
            shard.free()
            raise
        self._shards[number] = shard
        return shard.place

    def _read(self, number: int) -> Array:
        # A copy: it may be on its way while the next update is made.
        return self._shards[number].array.copy()

    def _read_rows(self, number: int, indices: Array) -> Array:
        return self._shards[number].array[indices]

    def _slot(self, number: int, key: int, kind: str) -> Array | None:
        slot = self._shards[number].slots.get((key, kind))
        return None if slot is None else slot.copy()

    def _stateful(self, key: int) -> list[int]:
        """Return which shards have state of an optimizer."""
        return [
            number
            for number, shard in self._shards.items()
            if any(owner == key for owner, _ in shard.slots)
        ]

    def _assign(self, kind: str, number: int, value: Array) -> None:
        shard = self._shards[number]
        operation = _OPERATIONS.get(kind)
        array = shard.array
        if operation is None:
            shard.update(lambda: np.copyto(array, value))
        else:
            shard.update(lambda: quietly(operation, array, value, array))

    def _scatter(
        self, kind: str, number: int, name: str, indices: Array, values: Array
    ) -> None:
        shard = self._shards[number]

        def change() -> None:
            array = shard.array
            if name == "replace":
                array[indices] = values
            elif name in ("add", "subtract"):
                # Each comes once: the client has added them up.
                array[indices] = quietly(getattr(np, name), array[indices], values)
            else:
                apply_at(name, array, indices, values)

        shard.update(change)

    def _rule(self, kind: str, key: int, rule: bytes) -> None:
        self._rules[key] = Optimizer.from_rule(pickle.loads(rule))

    def _take_steps(self, kind: str, key: int, rate: float, steps: Any) -> None:
        """Make an optimizer's step on each shard that there is a gradient for."""
        rule = self._rules[key]
        for number, gradient in steps:
            shard = self._shards[number]
            values = gradient[1] if isinstance(gradient, tuple) else gradient
            # The rule may write into it.
            values = values if values.flags.writeable else values.copy()
            if isinstance(gradient, tuple):
                values = IndexedSlices(values, gradient[0], shard.array.shape)
            slots = [self._slot_of(shard, key, *item) for item in rule.state.items()]
            count = shard.steps.get(key, self._begun.get(key, 0)) + 1
            shard.steps[key] = count
            step = Step(rate, count, shard.name)
            arrays = [shard.array, *slots]
            self._step(shard, rule, step, values, arrays)

    @staticmethod
    def _step(shard: _Shard, rule: Any, step: Step, values: Any, arrays: Any) -> None:
        # Not `quietly`, which the rule may use itself.
        with np.errstate(all="ignore"):
            shard.update(lambda: rule._update_one(step, values, arrays))

    @staticmethod
    def _slot_of(shard: _Shard, key: int, kind: str, initial: float) -> Array:
        slot = shard.slots.get((key, kind))
        if slot is None:
            slot = np.full(shard.array.shape, initial, shard.array.dtype)
            shard.slots[key, kind] = slot
        return slot

    def _set_slot(
        self, kind: str, number: int, key: int, name: str, value: Any
    ) -> None:
        self._shards[number].slots[key, name] = np.array(value)

    def _restored(self, kind: str, key: int, steps: int) -> None:
        """Count steps on from this one, on all shards, as other strategies do."""
        self._begun[key] = steps
        for shard in self._shards.values():
            shard.steps.pop(key, None)

    def _build(self, kind: str, number: int, key: int, state: dict[str, float]) -> None:
        """Make an optimizer's state of a shard, where it is not there."""
        for name, initial in state.items():
            self._slot_of(self._shards[number], key, name, initial)

    def _forget_state(self, kind: str) -> None:
        """Let all optimizers begin anew."""
        self._begun.clear()
        for shard in self._shards.values():
            shard.slots.clear()
            shard.steps.clear()

    def _delete(self, kind: str, number: int) -> None:
        self._shards.pop(number).free()
