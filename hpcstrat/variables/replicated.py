"""Distributed variables: mirrored variables, and variables synchronized on read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.context import current, own_index, second_strategy
from hpcstrat.engine.options import (
    VariableAggregation,
    VariableSynchronization,
)
from hpcstrat.engine.typing import Array
from hpcstrat.engine.values import (
    ONE_OF_MANY,
    Adopted,
    DistributedValues,
    HostValue,
    Mirrored,
    PerReplica,
)
from hpcstrat.variables.aggregation_rules import rule_of
from hpcstrat.variables.variable import Variable, apply_into, view_of

_NONE = VariableAggregation.NONE

_CROSS, _REPLICA, _UPDATE = "cross", "replica", "update"
_ALONE = Collectives(None)


class DistributedVariable(Variable, DistributedValues):
    """A variable with one component for each replica.

    A process has the components of its own replicas. For a mirrored variable, all
    replicas of a process share one array, because their components are equal.
    """

    _is_distributed = True

    def _initialize(self, initial_value: Any, dtype: Any) -> Array:
        what, make = f"creation of variable {self.name!r}", super()._initialize
        collectives: Any = self._strategy.collectives

        def shared() -> Any:
            own = make(initial_value, dtype)
            self._require_type(own.dtype)
            # Send nothing: the library's own state starts equal on all replicas.
            if type(initial_value) is HostValue and initial_value.is_own:
                return own
            if type(initial_value) is not Adopted:
                return collectives.broadcast(own, 0, what)
            # Another library owns this memory and continues to use it, so replica 0's
            # value is copied into the memory.
            if not initial_value.is_equal:
                np.copyto(own, collectives.broadcast(own, 0, what))
            return own

        # ``initial_value`` is called inside a collective call, so that Ctrl-C in it
        # ends the creation of the variable on all replicas.
        component: Array = collectives.call(what, shared)
        return component

    def _require_type(self, dtype: np.dtype[Any]) -> None:
        """Raise an error for a dtype that the variable's aggregation cannot combine."""
        rule = rule_of(self.aggregation)
        problem = None if rule is None else rule.type_problem(dtype)
        if problem is not None:
            expected, advice = problem
            raise ValueError(
                f"expected {expected} for variable {self.name!r} with aggregation "
                f"{self.aggregation.name}, found {dtype}; {advice}"
            )

    def _combined(self, parts: Sequence[Any], what: str) -> Any:
        """Combine the values of all replicas by the variable's aggregation.

        Collective over the strategy's replicas. ``parts`` has the values of this
        process's replicas.
        """
        rule = rule_of(self.aggregation)
        assert rule is not None
        return rule.combine(self._strategy, parts, what)

    @property
    def collectives(self) -> Collectives:
        """The object for the collective calls of this variable in the current context.

        For the library's own modules."""
        # The decorator `channel.entries.collective` reads this property.
        return self._strategy.collectives if self._communicates() else _ALONE

    def _communicates(self) -> bool:
        """Return whether the variable's methods are collective in this context."""
        raise NotImplementedError

    @property
    def _local(self) -> Array:
        return self._view

    def _mode(self) -> str:
        """Return the current context: cross-replica, replica or update."""
        entry = current()
        if entry is None:
            return _CROSS
        if entry.strategy is not self._strategy:
            # Under the default strategy, as outside of all scopes, the variable acts as
            # in cross-replica context.
            if entry.strategy.is_default:
                return _CROSS
            raise RuntimeError(
                f"expected variable {self.name!r} in the scope of the strategy that "
                f"it was made in, {self._strategy!r}, {second_strategy(entry.strategy)}"
            )
        if entry.replica_context is not None:
            return _REPLICA
        return _UPDATE if entry.updating else _CROSS

    def _as_mirrored(self, result: Any) -> Any:
        # As in tf.distribute, results are not wrapped if there is only one replica.
        if result is None or self._strategy.num_replicas_in_sync == 1:
            return result
        return self._strategy.replicas.mirrored(result)


class MirroredVariable(DistributedVariable, Mirrored):
    """A variable whose components are kept equal."""

    # Words for error messages: the kind of variable, and what could happen if replicas
    # assigned different values without combining them.
    _kind, _danger = "mirrored", "its copies could come to differ"

    def _initialize(self, initial_value: Any, dtype: Any) -> Array:
        # AUTO means ON_WRITE for mirrored variables.
        self.synchronization = VariableSynchronization.ON_WRITE
        return super()._initialize(initial_value, dtype)

    def _communicates(self) -> bool:
        return self._mode() is _REPLICA

    @property
    def values(self) -> tuple[Any, ...]:
        """The read-only array that this process's replicas share, once per replica."""
        return (self._view,) * len(self._strategy.local_replicas)

    def _made(self) -> None:
        self._strategy.variable_made(self)

    def value(self) -> Array:
        """Return this replica's component without a copy.

        Not collective.

        Returns
        -------
        ndarray
            A read-only view, whose elements change with the next update.
        """
        self._mode()
        return self._view

    @collective
    def _update(self, method: str, value: Any, read_value: bool) -> Any:
        mode = self._mode()
        if mode is _REPLICA and self._combines():
            self._require_aggregation(method)

            def apply(array: Array) -> Any:
                return self._apply(method, self._converted(method, array), read_value)

            own = self._converted(method, value)
            return self._apply_combined(method, own, apply, read_value)
        if mode is _REPLICA:
            own = self._converted(method, value)
            self._require_whole(method, own)
            return self._apply(method, own, read_value)
        if mode is _UPDATE:
            return self._apply(method, self._one_value(method, value), read_value)
        # If the value has a wrong shape or dtype on one replica, no replica may change
        # the variable, because the components would differ.
        with self._strategy.all_or_none(self, method):
            result = self._apply(method, self._one_value(method, value), read_value)
        return self._as_mirrored(result)

    def _require_whole(self, method: str, value: Any) -> None:
        """Raise CollectiveError if the ranks of this replica have other values."""
        what = f"{method} of variable {self.name!r}"
        self._strategy.inside.require_whole(what, value)

    def _combines(self) -> bool:
        """Return whether an update in replica context combines replicas' values."""
        strategy = self._strategy
        return strategy.num_replicas_in_sync > 1 or strategy.meetings is not None

    def _apply_combined(
        self,
        method: str,
        own: Any,
        apply: Callable[[Any], Any],
        read_value: bool = True,
    ) -> Any:
        """Combine the replicas' values by the aggregation, and apply the result."""
        what, meetings = f"{method} of variable {self.name!r}", self._strategy.meetings
        if meetings is None:
            return apply(self._combined([own], what))

        # Logical replicas of a process share one array, which is updated once.
        def act(parts: list[Any]) -> list[Any]:
            apply(self._combined(parts, what))
            return parts

        meetings.meet(what, act, own)
        return self._component.copy() if read_value else None

    def _one_value(self, method: str, value: Any) -> Array:
        """Convert a value to the variable's dtype; raise an error for a PerReplica."""
        if type(value) is PerReplica:
            raise ValueError(
                f"expected one value in {method} of {self._kind} variable "
                f"{self.name!r} in cross-replica context, found a PerReplica, with "
                f"which {self._danger}; {ONE_OF_MANY}"
            )
        return self._converted(method, value)

    def _require_aggregation(self, method: str) -> None:
        if self.aggregation is _NONE:
            raise ValueError(
                f"expected an aggregation for {method} of {self._kind} variable "
                f"{self.name!r} in replica context, found NONE, with which "
                f"{self._danger}; create it with aggregation='only_first_replica' "
                "for values that are equal on all replicas already, as after "
                "all_reduce, or with 'sum' or 'mean' for values to be combined here"
            )

    @collective
    def _scatter(self, method: str, rows: IndexedSlices) -> Any:
        mode = self._mode()
        if mode is _UPDATE:
            return self._scatter_own(method, rows)
        if mode is _CROSS:
            # As in `_update`, either all replicas change their components or none does.
            with self._strategy.all_or_none(self, method):
                self._require_meaning(method)
                result = self._scatter_own(method, rows)
            return self._as_mirrored(result)
        if not self._combines():
            self._require_meaning(method)
            self._require_whole(method, rows)
            return self._scatter_own(method, rows)
        self._require_aggregation(method)
        self._require_meaning(method)
        own = IndexedSlices(self._rows(method, rows), rows.indices, self.shape)
        apply = functools.partial(self._scatter_own, method)
        return self._apply_combined(method, own, apply)

    def _require_meaning(self, method: str) -> None:
        """Raise an error for a scatter method that the aggregation cannot combine."""
        rule = rule_of(self.aggregation)
        if rule is not None and method in rule.refused_methods:
            raise NotImplementedError(
                f"expected aggregation NONE or ONLY_FIRST_REPLICA for {method} of "
                f"variable {self.name!r}, found {self.aggregation.name}, which has no "
                "meaning for it; create it with aggregation='only_first_replica', and "
                "give all rows on replica 0: those of other replicas are passed over"
            )


class SyncOnReadVariable(DistributedVariable):
    """A variable whose components are updated separately, and combined when read."""

    def _keep(self, component: Array) -> None:
        more = range(len(self._strategy.local_replicas) - 1)
        self._components = [component, *(component.copy() for _ in more)]
        self._views = [view_of(own) for own in self._components]

    # The component and view of the running replica; in cross-replica context, of the
    # first replica of this process.
    @property
    def _component(self) -> Array:  # type: ignore[override]
        return self._components[own_index() or 0]

    @property
    def _view(self) -> Array:  # type: ignore[override]
        return self._views[own_index() or 0]

    @property
    def components(self) -> Sequence[Array]:
        return self._components

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, read-only."""
        return tuple(self._views)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        other: Any = super().__deepcopy__(memo)
        for own, kept in zip(other._components, self._components, strict=True):
            own[...] = kept
        return other  # type: ignore[no-any-return]

    def _communicates(self) -> bool:
        # In cross-replica context, reading is collective, and so are `assign_add` and
        # `assign_sub`, because they read the new value that they return.
        return self._mode() is _CROSS and self.aggregation is not _NONE

    @collective
    def value(self) -> Array:
        """Return this replica's component; in cross-replica context the combined value.

        Collective over the strategy's replicas in cross-replica context.

        Returns
        -------
        ndarray
            In replica context, a read-only view, whose elements change with the next
            update; in cross-replica context, a new array.

        Raises
        ------
        ValueError
            In cross-replica context, with aggregation ``NONE``.
        """
        if self._mode() is not _CROSS:
            return self._view
        if self.aggregation is _NONE:
            raise ValueError(
                f"expected an aggregation for reading variable {self.name!r} in "
                "cross-replica context, found NONE, which cannot be converted to a "
                "reduction; read this replica's part inside strategy.run, or create it "
                "with aggregation='sum', 'mean', or 'only_first_replica' for that of "
                "replica 0"
            )
        return read_all([self])[0]

    def _lasting(self) -> Array | None:
        # None in cross-replica context, where `value` returns a temporary array, which
        # NumPy would not keep alive.
        return self._view if self._mode() is not _CROSS else None

    @collective
    def _update(self, method: str, value: Any, read_value: bool) -> Any:
        if self._mode() is not _CROSS:
            return self._apply(method, self._converted(method, value), read_value)
        with self._strategy.all_or_none(self, method):
            array = self._assign_share(method, value)
        if not read_value:
            return None
        return array.copy() if method == "assign" else self.read_value()

    def _assign_share(self, method: str, value: Any) -> Array:
        """Update each component of this process by the replica's share of a value."""
        if type(value) is PerReplica:
            raise TypeError(
                f"expected one value in {method} of variable {self.name!r} in "
                "cross-replica context, found a PerReplica; assign inside strategy.run"
            )
        rule = rule_of(self.aggregation)
        if rule is None or (rule.divides and method != "assign"):
            advice = "update each replica's part inside strategy.run"
            if rule is not None:
                advice = f"assign the new {self.aggregation.name.lower()}, or {advice}"
            raise ValueError(
                f"expected another aggregation for {method} of SyncOnRead variable "
                f"{self.name!r} in cross-replica context, found "
                f"{self.aggregation.name}, for which each replica's share is not "
                f"defined; {advice}"
            )
        array = self._converted(method, value)
        count = self._strategy.num_replicas_in_sync
        replicas = self._strategy.local_replicas
        for replica, component in zip(replicas, self._components, strict=True):
            apply_into(component, method, rule.part(array, count, replica))
        return array

    def _scatter(self, method: str, rows: IndexedSlices) -> Any:
        raise NotImplementedError(
            f"expected a mirrored variable for {method}, found the SyncOnRead variable "
            f"{self.name!r}; assign its whole value"
        )


def has_logical_replicas(variable: Variable) -> bool:
    """Return whether a variable's strategy has logical replicas."""
    strategy = variable.distribute_strategy
    return strategy is not None and bool(strategy.logical)


def class_for_state(*, on_read: bool = True) -> type[Variable]:
    """Return the variable class for the library's own state, such as counters.

    Under every strategy that distributes variables, each replica has its own component
    of this state: the state is never in central storage or on parameter servers. Under
    other strategies the class is the plain Variable.
    """
    entry = current()
    if entry is None or not entry.strategy.distributes:
        return Variable
    return SyncOnReadVariable if on_read else MirroredVariable


def read_all(variables: Sequence[Variable], *, own_rows: bool = False) -> list[Array]:
    """Read all variables with one collective call per aggregation; return their values.

    Collective over the strategy's replicas if a variable is a SyncOnRead variable. All
    variables belong to one strategy, and their order is the same on every replica. For
    plain and mirrored variables the value is this replica's component, read-only,
    without a copy. For SyncOnRead variables it is the combination of all components, or
    with aggregation ``NONE`` the array of all components, of shape (num_replicas, ...).
    If ``own_rows`` is True, the value for aggregation ``NONE`` is only this replica's
    component, without a copy; but with logical replicas, the value of every SyncOnRead
    variable is then the array of all components.
    """
    # `Variable.value` would make a collective call for each SyncOnRead variable.
    results: list[Any] = [
        variable.value() if variable.is_remote else variable._view
        for variable in variables
    ]
    groups: dict[VariableAggregation, list[int]] = {}
    for index, variable in enumerate(variables):
        if not isinstance(variable, SyncOnReadVariable):
            continue
        if own_rows and has_logical_replicas(variable):
            groups.setdefault(_NONE, []).append(index)
        elif not own_rows or variable.aggregation is not _NONE:
            groups.setdefault(variable.aggregation, []).append(index)
    if not groups:
        return results
    strategy = variables[next(iter(groups.values()))[0]]._strategy
    collectives = strategy.collectives
    for aggregation, indices in sorted(groups.items(), key=lambda item: item[0].value):
        parts = [
            [variables[i].components[k] for i in indices]
            for k in range(len(strategy.local_replicas))
        ]
        names = ", ".join(variables[i].name for i in indices)
        what = f"reading of variables {names}"
        rule = rule_of(aggregation)
        if rule is None:
            own = [array_module(p[0]).stack(p) for p in zip(*parts, strict=True)]
            values = collectives.all_gather(own, 0, what)
        else:
            values = collectives.call(what, rule.combine, strategy, parts, what)
        for index, value in zip(indices, values, strict=True):
            results[index] = value
    return results
