"""A rank that holds variables, and does what others ask for, one after the other.

So an update of one shard is whole or not there, whatever the number of writers, and the
updates of one rank are made in the order in which it has sent them.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.casting import call_without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.row_updates import apply_at
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.parameters import Step
from hpcstrat.parameter_server.handles import error_bytes
from hpcstrat.parameter_server.mailbox import Mailbox
from hpcstrat.parameter_server.shared_files import FilePlace, SharedFiles

_OPERATIONS = {"assign_add": np.add, "assign_sub": np.subtract}


class _StoredShard:
    """A variable, or some of its rows, and the state of optimizers beside it."""

    __slots__ = ("array", "free", "name", "place", "slots", "steps", "version")

    def __init__(
        self, memory: SharedFiles, name: str, shape: tuple[int, ...], dtype: Any
    ) -> None:
        self.name = name
        self.array, self.version, self.place = memory.allocate(shape, dtype)
        # State by optimizer and kind; number of steps by optimizer.
        self.slots: dict[tuple[int, str], Array] = {}
        self.steps: dict[int, int] = {}

    def update(self, change: Callable[[], None]) -> None:
        """Change the array under an odd version, at which this node's readers wait."""
        self.version[0] += 1
        try:
            change()
        finally:
            self.version[0] += 1


class VariableServer:
    """Serves until all ``users``, which are ranks, have ended or are lost.

    ``client`` is the rank that an update came from: what it counts of them is told to
    it in shared memory, or when it asks.
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
        # Keyed by client and optimizer: each client has its own options.
        self._rules: dict[tuple[int, int], Any] = {}
        # Client whose update is being made.
        self._client = -1
        # Steps of optimizers before the restored ones.
        self._begun: dict[int, int] = {}
        # By client: the numbers of updates that have failed, and their errors.
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
        """Serve; return whether all have closed their strategies, rather than left."""
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
                # The client was a spare rank, and uses no servers any more.
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
            # It is raised where the client waits for its updates.
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
                # Answered after all earlier messages of this client.
                good, value = True, self._failures(client, *rest)
            else:
                good, value = True, self._answers[kind](*rest)
        except Exception as error:
            good, value = False, error_bytes(error)
        self._mailbox.reply(client, question, good, value)

    def _failures(self, client: int, last: int) -> tuple[int, list[bytes]]:
        """Return how many updates up to a number have failed, and the first error."""
        errors = self._errors[client]
        found = [error for number, error in errors if number <= last]
        del errors[: len(found)]
        return len(found), found[:1]

    def _create(
        self, number: int, name: str, shape: tuple[int, ...], dtype: Any, value: Any
    ) -> FilePlace:
        """Make a shard of an array, of what a function makes here, or of zeros."""
        shard = _StoredShard(self._memory, name, shape, dtype)
        if isinstance(value, bytes):
            pickle.loads(value)(shard.array)
        elif value is not None:
            shard.array[...] = value
        self._shards[number] = shard
        return shard.place

    def _read(self, number: int) -> Array:
        # A copy: it may be on its way while the next update is made.
        return self._shards[number].array.copy()

    def _read_rows(self, number: int, indices: Array) -> Array:
        return self._shards[number].array[indices]

    def _read_bytes(
        self, number: int, slot: tuple[int, str] | None, start: int, stop: int
    ) -> Array | None:
        """Return bytes of a shard, or of an optimizer's state, where there is some."""
        shard = self._shards[number]
        array = shard.array if slot is None else shard.slots.get(slot)
        return None if array is None else _bytes_of(array)[start:stop].copy()

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
            shard.update(
                lambda: call_without_fp_warnings(operation, array, value, array)
            )

    def _scatter(
        self, kind: str, number: int, name: str, indices: Array, values: Array
    ) -> None:
        shard = self._shards[number]

        def change() -> None:
            array = shard.array
            if name == "replace":
                array[indices] = values
            elif name in ("add", "subtract"):
                # No index is repeated: the client has added up the rows.
                array[indices] = call_without_fp_warnings(
                    getattr(np, name), array[indices], values
                )
            else:
                apply_at(name, array, indices, values)

        shard.update(change)

    def _rule(self, kind: str, key: int, rule: bytes) -> None:
        self._rules[self._client, key] = Optimizer.from_rule(pickle.loads(rule))

    def _take_steps(self, kind: str, key: int, rate: float, steps: Any) -> None:
        """Make an optimizer's step on each shard that there is a gradient for."""
        rule = self._rules[self._client, key]
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
    def _step(
        shard: _StoredShard, rule: Any, step: Step, values: Any, arrays: Any
    ) -> None:
        # Not `call_without_fp_warnings`, which the rule may use itself.
        with np.errstate(all="ignore"):
            shard.update(lambda: rule._update_one(step, values, arrays))

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
        """Replace bytes of a shard, or of an optimizer's state."""
        shard = self._shards[number]
        array = shard.array if slot is None else self._slot_of(shard, *slot)
        place = _bytes_of(array)[start : start + data.size]
        shard.update(lambda: np.copyto(place, data))

    def _restored(self, kind: str, key: int, steps: int) -> None:
        """Continue the count of steps of all shards from a number."""
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

    def _delete(self, kind: str, numbers: Iterable[int]) -> None:
        """Free shards, and the state of optimizers that count steps by a variable."""
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
    """Return a view of an array's bytes; it is contiguous."""
    return array.reshape(-1).view(np.uint8)
