"""State that optimizers keep for each variable, and the state's names in checkpoints.

Each variable has an array of each kind of state, such as ``momentum``. State belongs to
a variable object, not to its name, because two variables may have the same name.
Checkpoints store state by ``<kind>/<variable name>``: restored state waits until the
program updates a variable of that name.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import array_module, is_device, to_device
from hpcstrat.engine.context import pop, push
from hpcstrat.engine.options import (
    VariableAggregation,
    VariableOptions,
    VariableSynchronization,
)
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.variables import HostValue, ShardedVariable, Variable, class_for_state

_NONE = VariableAggregation.NONE

# A / in a variable's name creates groups in an HDF5 file. A name is escaped if a group
# would be named like a dataset: "dense" cannot be a dataset if there is a "dense/bias".
_ESCAPES = {"%": "%25", "/": "%2F", ".": "%2E", "\0": "%00"}


class _Owned:
    """One variable's optimizer state, by kind, and a weak reference to the variable."""

    __slots__ = ("kinds", "name", "variable")

    def __init__(self, variable: Variable, forget: Any) -> None:
        self.variable = weakref.ref(variable, forget)
        self.name = variable.name
        self.kinds: dict[str, Variable] = {}


class Slots:
    """The state of an optimizer: variables that are made when first needed."""

    def __init__(self) -> None:
        self._owned: dict[int, _Owned] = {}
        self._waiting: dict[str, Variable] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Slots:
        copied = Slots()
        memo[id(self)] = copied
        for name, slot in self.named().items():
            copied._waiting[name] = slot.__deepcopy__(memo)
        return copied

    def find(self, kind: str, variable: Variable) -> Variable | None:
        """Return a variable's state of the given kind; None if it was not made yet."""
        owned = self._owned.get(id(variable))
        return None if owned is None else owned.kinds.get(kind)

    def get(
        self, kind: str, variable: Variable, initial: float, *, sharded: bool = False
    ) -> Variable:
        """Return a variable's state, equal on every replica; the first call makes it.

        Collective over the strategy's replicas if the state must be made. The state has
        the variable's strategy, shape and dtype, and is on the same device. With
        ``sharded`` each rank stores only a part of the state's elements.
        """
        slot = self.find(kind, variable)
        if slot is None:
            component = variable.component
            if is_device(component):
                full = array_module(component).full
                array = full(variable.shape, initial, variable.dtype)
            else:
                # A single element is broadcast, to allocate no memory.
                element = np.full((), initial, variable.dtype)
                array = np.broadcast_to(element, variable.shape)
            slot = self.make(kind, variable, array, sharded=sharded)
        return slot

    def make(
        self,
        kind: str,
        variable: Variable,
        array: Array,
        *,
        aggregation: VariableAggregation = _NONE,
        sharded: bool = False,
    ) -> Variable:
        """Make a variable's state, or use restored state that waits for its name.

        Collective over the strategy's replicas. With an ``aggregation`` each replica
        has its own part, and checkpoints contain the combined value, for any number of
        replicas. Raises ValueError for a restored value of another shape.
        """
        if variable.split is not None:
            # Each rank of a replica has state of its own part.
            with variable.distribute_strategy.inside.divided():
                return self._make(kind, variable, array, aggregation, sharded=sharded)
        return self._make(kind, variable, array, aggregation, sharded=sharded)

    def _make(
        self,
        kind: str,
        variable: Variable,
        array: Array,
        aggregation: VariableAggregation,
        *,
        sharded: bool,
    ) -> Variable:
        name, strategy = f"{kind}/{variable.name}", variable.distribute_strategy
        on_read = aggregation is not _NONE
        # Numbers, such as counts of steps, are not divided.
        split = None if array.shape != variable.shape else variable.split
        divided: Any = None if split is None else variable
        each = on_read or sharded
        slot = self._claimed(
            name, strategy, array, aggregation, each_has=each, divided=divided
        )
        if sharded:
            # Restored state contains all elements, on every rank.
            whole = array if slot is None else slot.component
            token = push(strategy.cross_context)
            try:
                slot = ShardedVariable(HostValue(whole), trainable=False, name=name)
            finally:
                pop(token)
        if slot is None:
            slot = _made(
                *(name, strategy, array, aggregation),
                each_has=on_read,
                split=None if on_read else split,
            )
        if on_read and divided is not None:
            # Checkpoints have the whole value.
            part: Any = slot
            part.split, part.whole_shape = split, divided.whole_shape
        owned = self._owned.get(id(variable))
        if owned is None:
            # A method of this object as callback would keep the object alive.
            forget, number = self._owned.pop, id(variable)
            owned = _Owned(variable, lambda _: forget(number, None))
            self._owned[number] = owned
        owned.kinds[kind] = slot
        return slot

    def count(self, name: str, strategy: Replicas) -> Variable:
        """Return a counter that belongs to the optimizer, not to one variable.

        Collective over the strategy's replicas."""
        zero = np.zeros((), np.int64)
        slot = self._claimed(name, strategy, zero, each_has=True)
        return _made(name, strategy, zero, each_has=True) if slot is None else slot

    def _claimed(
        self,
        name: str,
        strategy: Replicas | None,
        array: Array,
        aggregation: VariableAggregation = _NONE,
        *,
        each_has: bool,
        divided: Any = None,
    ) -> Variable | None:
        """Remove and return the restored state of this name, or return None.

        Collective over the strategy's replicas if there is restored state. With
        ``each_has`` each replica has its own component, under every strategy. The state
        of a ``divided`` variable is this rank's part of the restored state.
        """
        found = next((n for n in spellings(name) if n in self._waiting), None)
        if found is None:
            return None
        if strategy is not None:
            # After the barrier, either all ranks use the restored state or none does.
            strategy.collectives.barrier(f"restored state {name}")
        saved = self._waiting[found]
        shape = array.shape if divided is None else divided.whole_shape
        if saved.shape != shape:
            raise ValueError(
                f"expected a saved value of shape {shape} for {name!r}, found "
                f"{saved.shape}; restore a checkpoint of the same model"
            )
        del self._waiting[found]
        same = saved.dtype == array.dtype and saved.distribute_strategy is strategy
        # Waiting state has a component on each replica. If the state must have another
        # class, its value is copied.
        stays = each_has or type(saved) is _class_of_state(strategy)
        if same and stays and not is_device(array) and divided is None:
            return saved
        value, split = saved.component, None
        if divided is not None:
            inside = divided.distribute_strategy.inside
            # Copy the part, because a view would keep the whole value in memory.
            value = value[inside.region(shape, divided.split)].copy()
            split = None if aggregation is not _NONE else divided.split
        value = value.astype(array.dtype, copy=False)
        value = to_device(value) if is_device(array) else value
        return _made(
            *(name, strategy, value, aggregation),
            is_own=True,
            each_has=each_has,
            split=split,
        )

    def wait(
        self,
        name: str,
        value: Array,
        strategy: Replicas | None,
        aggregation: VariableAggregation = _NONE,
    ) -> None:
        """Store restored state until a variable of its name needs it.

        All replicas make these calls in the same order. ``name`` is
        ``<kind>/<variable>``, ``value`` this replica's component.
        """
        slot = _made(name, strategy, value, aggregation, is_own=True, each_has=True)
        self._waiting[name] = slot

    def take(self, name: str) -> Array | None:
        """Remove and return the restored state called ``name``; None if none waits."""
        found = next((n for n in spellings(name) if n in self._waiting), None)
        return None if found is None else self._waiting.pop(found).component

    def waiting(self, kind: str) -> dict[str, Variable]:
        """Return the waiting restored state of the given kind, by variable name."""
        kinds = {n: n.partition("/") for n in self._waiting}
        return {
            rest: self._waiting[name]
            for name, (first, _, rest) in kinds.items()
            if first == kind
        }

    def of_kind(self, kind: str) -> Iterator[tuple[Variable, Variable]]:
        """Yield pairs of a live variable and its state of the given kind.

        The pairs are in the order in which the variables first got any state."""
        # The loop runs over a copy, because the garbage collector may free a variable
        # meanwhile and change the dict.
        for owned in list(self._owned.values()):
            variable, slot = owned.variable(), owned.kinds.get(kind)
            if variable is not None and slot is not None:
                yield variable, slot

    def named(self) -> dict[str, Variable]:
        """Return all state, including restored state that waits, by its names in files.

        The order is the same on every replica, even if an error has left waiting state
        on one replica only. Raises ValueError if two variables have the same name.
        """
        found: list[tuple[str, Variable]] = list(self._waiting.items())
        for owned in list(self._owned.values()):
            if owned.variable() is not None:
                kinds = owned.kinds.items()
                found += [(f"{kind}/{owned.name}", slot) for kind, slot in kinds]
        # Names are sorted, so that a duplicate name's error is equal on every replica.
        found.sort(key=lambda item: item[0])
        names = file_names([name for name, _ in found])
        return dict(zip(names, [slot for _, slot in found], strict=True))

    def forget_garbage(self, current: Collection[int]) -> None:
        """Free variables that only reference cycles keep alive, and their state.

        Without this call, ranks could have different state, because their garbage
        collectors run at different times. ``current`` has the ids of the variables in
        use; if there is state of other variables, the garbage collector runs.
        """
        if not all(number in current for number in list(self._owned)):
            gc.collect()

    def drop(self, *kinds: str) -> None:
        """Delete the restored state of these kinds that still waits for variables."""
        for name in list(self._waiting):
            if name.partition("/")[0] in kinds:
                del self._waiting[name]

    def clear(self, *kinds: str) -> None:
        """Set this replica's state of these kinds to zero, for all variables."""
        for kind in kinds:
            slots = [slot for _, slot in self.of_kind(kind)]
            for slot in (*slots, *self.waiting(kind).values()):
                slot.component[...] = 0


def _class_of_state(strategy: Any) -> type[Variable]:
    """Return the variable class for state that is equal on all replicas."""
    if strategy is None:
        return Variable
    kind: type[Variable] = strategy.variable_class(VariableOptions(trainable=False))
    return kind


def _made(
    name: str,
    strategy: Replicas | None,
    array: Array,
    aggregation: VariableAggregation = _NONE,
    *,
    is_own: bool = False,
    each_has: bool = False,
    split: Any = None,
) -> Variable:
    """Make a variable for state; collective unless ``is_own`` and ``each_has``.

    ``split`` is that of a divided variable."""
    on, on_read = VariableSynchronization, aggregation is not _NONE
    on_host = not is_device(array)
    # Steps run in replica context, but variables are made in a scope.
    token = push(None if strategy is None else strategy.cross_context)
    try:
        kind = class_for_state(on_read=on_read) if each_has else Variable
        return kind(
            HostValue(array, is_own=is_own) if on_host or is_own else array,
            trainable=False,
            name=name,
            synchronization=on.ON_READ if on_read else on.AUTO,
            aggregation=aggregation,
            split=split,
        )
    finally:
        pop(token)


def _escaped(name: str) -> str:
    return "".join(_ESCAPES.get(letter, letter) for letter in name)


def unescaped(path: str) -> str:
    """Return ``<kind>/<name>`` for a name that `file_names` has returned."""
    kind, slash, name = path.partition("/")
    for letter, code in reversed(_ESCAPES.items()):
        name = name.replace(code, letter)
    return kind + slash + name


def spellings(name: str) -> list[str]:
    """Return the names under which a file may contain state of this name."""
    kind, slash, rest = name.partition("/")
    escaped = kind + slash + _escaped(rest)
    return [name] if escaped == name else [name, escaped]


def file_names(names: Sequence[str]) -> list[str]:
    """Return, for each name ``<kind>/<name>``, a name that HDF5 allows for a dataset.

    The result depends on the set of names, not on their order. Most names are kept.
    """
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        kind, _, name = twice[0].partition("/")
        raise ValueError(
            f"expected variables with names of their own to save the state of their "
            f"optimizer, found {kind} of several variables named {name!r}; name them "
            "with Variable(..., name=...)"
        )
    every = set(names)
    return [_file_name(name, every) for name in names]


def _file_name(name: str, every: set[str]) -> str:
    kind, slash, rest = name.partition("/")
    parts = rest.split("/")
    inside = any(
        "/".join([kind, *parts[:count]]) in every for count in range(1, len(parts))
    )
    unfit = any(part in ("", ".", "..") or "\0" in part for part in parts)
    ambiguous = any(code in rest for code in _ESCAPES.values())
    if slash and (inside or unfit or ambiguous):
        return f"{kind}/{_escaped(rest)}"
    return name
