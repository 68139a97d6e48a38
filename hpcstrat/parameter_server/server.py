"""The loop of a server, a rank that holds variables and answers requests in turn.

Because a server handles one request at a time, no rank reads a half-made update, and
the updates of a rank are made in the order in which the rank sent them.
"""

from __future__ import annotations

import functools
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import call_without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.rules import Step
from hpcstrat.parameter_server.handles import error_bytes
from hpcstrat.parameter_server.mailbox import Mailbox
from hpcstrat.parameter_server.shared_files import FilePlace, SharedFiles
from hpcstrat.variables.variable import apply_into, scatter_into

_OPERATIONS = {"scatter_add": np.add, "scatter_sub": np.subtract}


class _StoredShard:
    """A variable, or some of its rows, and the optimizer state of these rows."""

    __slots__ = ("array", "free", "name", "place", "slots", "steps", "version")

    def __init__(
        self, memory: SharedFiles, name: str, shape: tuple[int, ...], dtype: Any
    ) -> None:
        self.name = name
        self.array, self.version, self.place = memory.allocate(shape, dtype)
        # State arrays by optimizer and kind, and numbers of steps by optimizer.
        self.slots: dict[tuple[int, str], Array] = {}
        self.steps: dict[int, int] = {}

    def update(self, change: Callable[[], None]) -> None:
        """Call ``change``, which modifies the array.

        Meanwhile the version is odd, so that readers on this node wait.
        """
        self.version[0] += 1
        try:
            change()
        finally:
            self.version[0] += 1


class VariableServer:
    """Serves the requests of ranks, until all ``users`` have ended or are lost.

    In the methods, ``client`` is the rank that sent a request. A client on this node
    reads in shared memory how many of its updates were made and how many failed; a
    client on another node sends a request for these numbers.
    """

    def __init__(self, mailbox: Mailbox, users: Collection[int]) -> None:
        self._mailbox, self._bells = mailbox, mailbox.wakeup_pipes
        self._users = set(users)
        place = mailbox.wakeup_pipes.place(mailbox.rank)
        assert place is not None
        self._applied, self._failed = (
            mailbox.wakeup_pipes.applied[place],
            mailbox.wakeup_pipes.failed[place],
        )
        self._memory = SharedFiles()
        self._shards: dict[int, _StoredShard] = {}
        # Rules by client and optimizer, because clients may have different options.
        self._rules: dict[tuple[int, int], Any] = {}
        # The client that sent the current update.
        self._client = -1
        # By optimizer: the number of steps in the restored checkpoint.
        self._begun: dict[int, int] = {}
        # By client: number and error of each failed update.
        self._errors: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self._answers: dict[str, Callable[..., Any]] = {
            "create": self._create,
            "read": self._read,
            "read_rows": self._read_rows,
            "read_bytes": self._read_bytes,
            "stateful": self._stateful,
        }
        self._updates: dict[str, Callable[..., None]] = {
            "assign": self._assign,
            "assign_add": self._assign,
            "assign_sub": self._assign,
            "scatter": self._scatter,
            "rule": self._rule,
            "steps": self._take_steps,
            "write_bytes": self._write_bytes,
            "restored": self._restored,
            "build": self._build,
            "forget_state": self._forget_state,
            "delete": self._delete,
        }

    def serve(self) -> bool:
        """Serve until all users end; return whether all of them closed the strategy."""
        closes, mailbox = True, self._mailbox
        ended: set[int] = set()

        def look() -> Any:
            return mailbox.poll() or ended | mailbox.lost >= self._users

        while (found := mailbox.wait(look, lambda: "a request")) is not True:
            client, (kind, *rest) = found
            if kind == "ask":
                self._answer(client, *rest)
            elif kind == "end":
                ended.add(client)
                closes = closes and rest[0]
                mailbox.hear(rest[1])
            elif kind == "serves":
                # This spare rank has become a server, so it is not a user any more.
                self._users.discard(client)
            else:
                self._apply(client, kind, rest)
        for user in self._users:
            mailbox.send(user, ("ended", closes))
        mailbox.wait(mailbox.drive, lambda: "the others to hear of the end")
        self._shards.clear()
        self._memory.close()
        return closes

    def _apply(self, client: int, kind: str, rest: Any) -> None:
        self._client = client
        try:
            self._updates[kind](kind, *rest)
        except Exception as error:
            # The client raises the error when it waits for its updates.
            number = int(self._applied[client]) + 1
            self._errors[client].append((number, error_bytes(error)))
            self._failed[client] += 1
        self._applied[client] += 1
        self._bells.ring(client)

    def _answer(self, client: int, question: int, message: Any) -> None:
        kind, *rest = message
        value: Any
        try:
            if kind == "flush":
                # This client's earlier updates were made before this question.
                good, value = True, self._failures(client, *rest)
            else:
                good, value = True, self._answers[kind](*rest)
        except Exception as error:
            good, value = False, error_bytes(error)
        self._mailbox.reply(client, question, good, value)

    def _failures(self, client: int, last: int) -> tuple[int, list[bytes]]:
        """Return how many updates up to ``last`` failed, and the first error.

        The errors are removed, so that each call returns only new failures.
        """
        errors = self._errors[client]
        found = [error for number, error in errors if number <= last]
        del errors[: len(found)]
        return len(found), found[:1]

    def _create(
        self, number: int, name: str, shape: tuple[int, ...], dtype: Any, value: Any
    ) -> FilePlace:
        """Make a shard from an array or a pickled function; None means zeros."""
        shard = _StoredShard(self._memory, name, shape, dtype)
        if isinstance(value, bytes):
            pickle.loads(value)(shard.array)
        elif value is not None:
            shard.array[...] = value
        self._shards[number] = shard
        return shard.place

    def _read(self, number: int) -> Array:
        # Copy, because the next update may change the array before the reply is sent.
        return self._shards[number].array.copy()

    def _read_rows(self, number: int, indices: Array) -> Array:
        return self._shards[number].array[indices]

    def _read_bytes(
        self, number: int, slot: tuple[int, str] | None, start: int, stop: int
    ) -> Array | None:
        """Return bytes of a shard, or of its state ``slot`` (None if not yet made)."""
        shard = self._shards[number]
        array = shard.array if slot is None else shard.slots.get(slot)
        return None if array is None else _bytes_of(array)[start:stop].copy()

    def _stateful(self, key: int) -> list[int]:
        """Return the numbers of the shards that have state of an optimizer."""
        return [
            number
            for number, shard in self._shards.items()
            if any(owner == key for owner, _ in shard.slots)
        ]

    def _assign(self, kind: str, number: int, value: Array) -> None:
        shard = self._shards[number]
        shard.update(lambda: apply_into(shard.array, kind, value))

    def _scatter(
        self, kind: str, number: int, method: str, indices: Array, values: Array
    ) -> None:
        shard = self._shards[number]
        operation = _OPERATIONS.get(method)

        def change() -> None:
            array = shard.array
            if operation is None:
                scatter_into(array, method, indices, values)
            else:
                # This is right only without repeated indices: the client has summed
                # rows with equal indices.
                array[indices] = call_without_fp_warnings(
                    operation, array[indices], values
                )

        shard.update(change)

    def _rule(self, kind: str, key: int, rule: bytes) -> None:
        self._rules[self._client, key] = Optimizer.from_rule(pickle.loads(rule))

    def _take_steps(self, kind: str, key: int, rate: float, steps: Any) -> None:
        """Make a step of an optimizer on each shard that has a gradient."""
        rule = self._rules[self._client, key]
        for number, gradient in steps:
            shard = self._shards[number]
            values = gradient[1] if isinstance(gradient, tuple) else gradient
            # Copy a read-only gradient, because the rule may write into it.
            values = values if values.flags.writeable else values.copy()
            if isinstance(gradient, tuple):
                values = IndexedSlices(values, gradient[0], shard.array.shape)
            slots = [self._slot_of(shard, key, *item) for item in rule.state.items()]
            count = shard.steps.get(key, self._begun.get(key, 0)) + 1
            shard.steps[key] = count
            step = Step(rate, count, shard.name)
            update = functools.partial(
                rule.update_arrays, step, values, [shard.array, *slots]
            )
            # Do not use `call_without_fp_warnings`, which must not call Python code.
            with np.errstate(all="ignore"):
                shard.update(update)

    @staticmethod
    def _slot_of(shard: _StoredShard, key: int, kind: str, initial: float) -> Array:
        slot = shard.slots.get((key, kind))
        if slot is None:
            slot = np.full(shard.array.shape, initial, shard.array.dtype)
            shard.slots[key, kind] = slot
        return slot

    def _write_bytes(
        self,
        kind: str,
        number: int,
        slot: tuple[int, str, float] | None,
        start: int,
        data: Array,
    ) -> None:
        """Replace bytes of a shard or of an optimizer's state."""
        shard = self._shards[number]
        array = shard.array if slot is None else self._slot_of(shard, *slot)
        place = _bytes_of(array)[start : start + data.size]
        shard.update(lambda: np.copyto(place, data))

    def _restored(self, kind: str, key: int, steps: int) -> None:
        """Set the number of steps that an optimizer had made when it was saved."""
        self._begun[key] = steps
        for shard in self._shards.values():
            shard.steps.pop(key, None)

    def _build(self, kind: str, number: int, key: int, state: dict[str, float]) -> None:
        """Make the state that an optimizer has for a shard, if it is missing."""
        for name, initial in state.items():
            self._slot_of(self._shards[number], key, name, initial)

    def _forget_state(self, kind: str) -> None:
        """Delete the state and the numbers of steps of all optimizers."""
        self._begun.clear()
        for shard in self._shards.values():
            shard.slots.clear()
            shard.steps.clear()

    def _delete(self, kind: str, numbers: Iterable[int]) -> None:
        """Free shards; if one is an optimizer's step counter, free its state, too."""
        for number in numbers:
            self._shards.pop(number, None)
            self._begun.pop(number, None)
            for owner in [owner for owner in self._rules if owner[1] == number]:
                del self._rules[owner]
            for shard in self._shards.values():
                shard.steps.pop(number, None)
                for key in [key for key in shard.slots if key[0] == number]:
                    del shard.slots[key]


def _bytes_of(array: Array) -> Array:
    """Return a view of a contiguous array's bytes."""
    return array.reshape(-1).view(np.uint8)
