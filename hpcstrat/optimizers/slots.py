"""The state that optimizers keep for each variable, and its names in checkpoints.

State belongs to a variable, not to its name, which another variable may have.
Checkpoints know it by name: restored state waits for the variable of that name.
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

# A / in a variable's name makes groups of HDF5. A name that cannot is escaped: "dense"
# cannot be both a dataset and the group of "dense/bias".
_ESCAPES = {"%": "%25", "/": "%2F", ".": "%2E", "\0": "%00"}


class _Owned:
    """The state of one variable, by kind; it does not keep the variable alive."""

    __slots__ = ("kinds", "name", "variable")

    def __init__(self, variable: Variable, forget: Any) -> None:
        self.variable = weakref.ref(variable, forget)
        self.name = variable.name
        self.kinds: dict[str, Variable] = {}


class Slots:
    """The state of an optimizer: variables that are made when they are first needed."""

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
        """Return state of a variable; None if it was not made."""
        owned = self._owned.get(id(variable))
        return None if owned is None else owned.kinds.get(kind)

    def get(
        self, kind: str, variable: Variable, initial: float, *, sharded: bool = False
    ) -> Variable:
        """Return state of a variable that is the same on every replica.

        Collective over the strategy's replicas, the first time. It has the variable's
        strategy, shape, dtype and memory; with ``sharded`` each rank has a part of its
        elements.
        """
        slot = self.find(kind, variable)
        if slot is None:
            component = variable.component
            if is_device(component):
                full = array_module(component).full
                array = full(variable.shape, initial, variable.dtype)
            else:
                # One element, broadcast, so that the initial value takes no memory.
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
        """Make state of a variable, or take restored state that waits for its name.

        Collective over the strategy's replicas. With an ``aggregation`` each replica
        has a part, synchronized on read: checkpoints hold the combined value, for any
        number of replicas. Raises ValueError if the restored value has another shape.
        """
        name, strategy = f"{kind}/{variable.name}", variable.distribute_strategy
        on_read = aggregation is not _NONE
        slot = self._claimed(
            name, strategy, array, aggregation, each_has=on_read or sharded
        )
        if sharded:
            # Restored state is whole, on each rank.
            whole = array if slot is None else slot.component
            token = push(strategy.cross_entry)
            try:
                slot = ShardedVariable(HostValue(whole), trainable=False, name=name)
            finally:
                pop(token)
        if slot is None:
            slot = _made(name, strategy, array, aggregation, each_has=on_read)
        owned = self._owned.get(id(variable))
        if owned is None:
            # Not a method, which would keep this object alive.
            forget, number = self._owned.pop, id(variable)
            owned = _Owned(variable, lambda _: forget(number, None))
            self._owned[number] = owned
        owned.kinds[kind] = slot
        return slot

    def count(self, name: str, strategy: Replicas) -> Variable:
        """Return a count of the optimizer's own, which belongs to no variable.

        Collective over the strategy's replicas, unless it has been restored.
        """
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
    ) -> Variable | None:
        """Return restored state, which waits no longer; collective if there is any.

        With ``each_has`` each replica has its own component, under every strategy.
        """
        found = next((n for n in spellings(name) if n in self._waiting), None)
        if found is None:
            return None
        if strategy is not None:
            # All ranks take the state or none, so that all save it from the same place.
            strategy.collectives.barrier(f"restored state {name}")
        saved = self._waiting[found]
        if saved.shape != array.shape:
            raise ValueError(
                f"expected a saved value of shape {array.shape} for {name!r}, found "
                f"{saved.shape}; restore a checkpoint of the same model"
            )
        del self._waiting[found]
        same = saved.dtype == array.dtype and saved.distribute_strategy is strategy
        # Waiting state has a component on each replica; other classes have not.
        stays = each_has or type(saved) is _class_of_state(strategy)
        if same and stays and not is_device(array):
            return saved
        value = saved.component.astype(array.dtype, copy=False)
        value = to_device(value) if is_device(array) else value
        return _made(name, strategy, value, aggregation, is_own=True, each_has=each_has)

    def wait(
        self,
        name: str,
        value: Array,
        strategy: Replicas | None,
        aggregation: VariableAggregation = _NONE,
    ) -> None:
        """Keep restored state until the variable of its name needs it.

        All replicas do it in the same order. ``name`` is ``<kind>/<variable>``,
        ``value`` this replica's component.
        """
        slot = _made(name, strategy, value, aggregation, is_own=True, each_has=True)
        self._waiting[name] = slot

    def take(self, name: str) -> Array | None:
        """Remove and return restored state that waits; None if there is none."""
        found = next((n for n in spellings(name) if n in self._waiting), None)
        return None if found is None else self._waiting.pop(found).component

    def waiting(self, kind: str) -> dict[str, Variable]:
        """Return restored state whose variable is not made yet, by the variable's
        name.
        """
        kinds = {n: n.partition("/") for n in self._waiting}
        return {
            rest: self._waiting[name]
            for name, (first, _, rest) in kinds.items()
            if first == kind
        }

    def of_kind(self, kind: str) -> Iterator[tuple[Variable, Variable]]:
        """Yield the living variables that have state of a kind, in the order of
        creation.
        """
        # A copy in one step: the garbage collector may free a variable meanwhile.
        for owned in list(self._owned.values()):
            variable, slot = owned.variable(), owned.kinds.get(kind)
            if variable is not None and slot is not None:
                yield variable, slot

    def named(self) -> dict[str, Variable]:
        """Return all state, waiting state included, by its names for files.

        The order is the same on every replica, also if an error left state waiting on
        one of them only. Raises ValueError if two variables have the same name.
        """
        found: list[tuple[str, Variable]] = list(self._waiting.items())
        for owned in list(self._owned.values()):
            if owned.variable() is not None:
                kinds = owned.kinds.items()
                found += [(f"{kind}/{owned.name}", slot) for kind, slot in kinds]
        # A stable order, so that the error about a name is the same on every replica.
        found.sort(key=lambda item: item[0])
        names = file_names([name for name, _ in found])
        return dict(zip(names, [slot for _, slot in found], strict=True))

    def forget_garbage(self, current: Collection[int]) -> None:
        """Forget variables that only reference cycles keep alive.

        Otherwise the garbage collector, which runs at different times on each rank,
        would decide which state a rank has. ``current`` are the ids of the variables in
        use; if there are no others, nothing is collected.
        """
        if not all(number in current for number in list(self._owned)):
            gc.collect()

    def drop(self, *kinds: str) -> None:
        """Drop state of some kinds that waits for its variables."""
        for name in list(self._waiting):
            if name.partition("/")[0] in kinds:
                del self._waiting[name]

    def clear(self, *kinds: str) -> None:
        """Set this replica's part of some kinds of state to zero, for all variables."""
        for kind in kinds:
            slots = [slot for _, slot in self.of_kind(kind)]
            for slot in (*slots, *self.waiting(kind).values()):
                slot.component[...] = 0


def _class_of_state(strategy: Any) -> type[Variable]:
    """Return the class of state that is the same on all replicas."""
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
) -> Variable:
    """Make a variable for state; collective unless ``is_own`` and ``each_has``."""
    on, on_read = VariableSynchronization, aggregation is not _NONE
    on_host = not is_device(array)
    # In the scope of the strategy, whatever the context of the step.
    token = push(None if strategy is None else strategy.cross_entry)
    try:
        kind = class_for_state(on_read=on_read) if each_has else Variable
        return kind(
            HostValue(array, is_own=is_own) if on_host or is_own else array,
            trainable=False,
            name=name,
            synchronization=on.ON_READ if on_read else on.AUTO,
            aggregation=aggregation,
        )
    finally:
        pop(token)


def _escaped(name: str) -> str:
    return "".join(_ESCAPES.get(letter, letter) for letter in name)


def unescaped(path: str) -> str:
    """Return ``<kind>/<name>`` of a name that `file_names` has given."""
    kind, slash, name = path.partition("/")
    for letter, code in reversed(_ESCAPES.items()):
        name = name.replace(code, letter)
    return kind + slash + name


def spellings(name: str) -> list[str]:
    """Return the names under which files may have some state."""
    kind, slash, rest = name.partition("/")
    escaped = kind + slash + _escaped(rest)
    return [name] if escaped == name else [name, escaped]


def file_names(names: Sequence[str]) -> list[str]:
    """Return the names for files of ``<kind>/<name>``, each a dataset of its own.

    They depend on the set of names, not on its order. Most stay as they are.
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
