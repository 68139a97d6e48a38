"""The objects that a `CheckpointManager` saves and restores."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

from hpcstrat.checkpoint.agreement import is_of_group, of_all_groups, refuse_torch
from hpcstrat.checkpoint.file.division import Box
from hpcstrat.checkpoint.file.plain_state import as_text
from hpcstrat.checkpoint.file.schema import (
    RESERVED,
    Entry,
    Header,
    dtype_name,
    section_of,
)
from hpcstrat.engine.arrays.kinds import to_host
from hpcstrat.engine.options import VariableAggregation
from hpcstrat.engine.typing import SupportsCheckpoint, SupportsDeferredCheckpoint
from hpcstrat.strategies import get_strategy
from hpcstrat.variables import (
    DistributedVariable,
    SyncOnReadVariable,
    Variable,
    has_logical_replicas,
    read_all,
)
from hpcstrat.variables.sharded import read_sharded

__all__ = ["Objects", "own_region", "pieces_of", "whole_shape"]


_read_own = partial(read_all, own_rows=True)


@runtime_checkable
class _SupportsPosition(Protocol):
    """A dataset or random streams, whose state has fields that the format defines."""

    def state(self) -> dict[str, Any]: ...

    def check_state(self, state: dict[str, Any]) -> None: ...

    def restore_state(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class _SupportsPlainState(Protocol):
    """An object with ``state_dict``; a save stores only the state on replica 0."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Objects:
    """The named objects to save: variables, optimizers, datasets and others.

    Raises ValueError if an object cannot be saved, or if strategies of objects differ.
    """

    def __init__(self, objects: dict[str, Any]) -> None:
        self._variables: dict[str, Variable] = {}
        self._stateful: dict[str, SupportsCheckpoint] = {}
        # Paths of stateful objects' variables that have been checked to be valid.
        self._checked: set[str] = set()
        # Stateful objects that the program has put into dicts and lists of variables.
        self._nested: list[SupportsCheckpoint] = []
        # Datasets and random streams, and objects with ``state_dict``, by name.
        self.iterators: dict[str, Any] = {}
        self.python: dict[str, Any] = {}
        # Names in ``python`` that a checkpoint may lack.
        self._optional: set[str] = set()
        for name, thing in objects.items():
            _check_name(name)
            if name in RESERVED:
                raise ValueError(
                    f"expected a name that is not reserved, found {name!r}; choose one "
                    f"other than {', '.join(RESERVED)}"
                )
            self._add(name, thing)
        self.strategy = self._common_strategy()

    def _add(self, name: str, thing: Any) -> None:
        if isinstance(thing, (Variable, Mapping, list, tuple)):
            self._add_tree(f"variables/{name}", thing)
        elif isinstance(thing, SupportsCheckpoint):
            self._stateful[name] = thing
        elif isinstance(thing, _SupportsPosition):
            self.iterators[name] = thing
        elif isinstance(thing, _SupportsPlainState):
            refuse_torch(name, thing)
            # Raise errors of the state now: the first save may be hours later.
            as_text(name, thing.state_dict())
            self.python[name] = thing
        else:
            raise ValueError(
                f"expected a Variable, a structure of Variables, an optimizer, a data "
                f"set, random streams, or an object with state_dict and "
                f"load_state_dict as {name!r}, found {type(thing).__name__}; keep its "
                "state in one of these"
            )

    def _add_tree(self, path: str, thing: Any) -> None:
        if isinstance(thing, Variable):
            self._variables[path] = thing
        elif isinstance(thing, Mapping):
            # Names in HDF5 are text: the keys 1 and "1" would be the same dataset.
            names = [_check_name(str(key)) for key in thing]
            if len(set(names)) != len(names):
                raise ValueError(
                    f"expected keys that differ as text in {path}, found "
                    f"{list(thing)}; rename one"
                )
            for name, value in zip(names, thing.values(), strict=True):
                self._add_tree(f"{path}/{name}", value)
        elif isinstance(thing, (list, tuple)):
            for index, value in enumerate(thing):
                self._add_tree(f"{path}/{index}", value)
        elif isinstance(thing, SupportsCheckpoint) and not isinstance(
            # Variables of ``thing`` must exist now: paths in a dict or list are fixed.
            thing,
            SupportsDeferredCheckpoint,
        ):
            self._add_tree(path, thing.checkpoint_variables())
            self._nested.append(thing)
        else:
            raise ValueError(
                f"expected a Variable at {path}, found {type(thing).__name__}; leave "
                "it out, or make it a Variable"
            )

    def _common_strategy(self) -> Any:
        found = [
            variable.distribute_strategy
            for variable in self.variables().values()
            if isinstance(variable, DistributedVariable) or variable.is_remote
        ]
        for name, thing in [*self.iterators.items(), *self.python.items()]:
            strategy = getattr(thing, "distribute_strategy", None)
            if strategy is not None and strategy.distributes:
                found.append(strategy)
                if is_of_group(thing):
                    raise ValueError(
                        f"expected a data set or random streams of all replicas as "
                        f"{name!r}, found those of a group; make them by the strategy "
                        "of all replicas, SyncGroups.everyone"
                    )
        # A manager with variables of groups belongs to the strategy of all replicas.
        wholes = [of_all_groups(strategy) for strategy in found]
        strategies = {id(strategy): strategy for strategy in wholes}
        if len(strategies) > 1:
            raise ValueError(
                "expected variables and random streams of one strategy, found those of "
                f"{list(strategies.values())}; use a CheckpointManager for each"
            )
        if strategies:
            return next(iter(strategies.values()))
        return of_all_groups(get_strategy())

    def add_optional(self, name: str, thing: _SupportsPlainState) -> None:
        """Add or replace an object with plain state that old checkpoints may lack."""
        if name in self.names - self._optional:
            raise ValueError(
                f"expected no object named {name!r}, found one; give it another name"
            )
        self.python[name] = thing
        self._optional.add(name)

    def variables(self) -> dict[str, Variable]:
        """Return all variables that the objects have now, by path in the file."""
        for thing in self._nested:
            # Call this because a metric then adds its pending updates to its variables.
            thing.checkpoint_variables()
        # Ask in each call, because an optimizer makes variables in its first step.
        found = dict(self._variables)
        for name, thing in self._stateful.items():
            for path, variable in thing.checkpoint_variables().items():
                if path not in self._checked:
                    for part in path.split("/"):
                        _check_name(part)
                    self._checked.add(path)
                found[f"{name}/{path}"] = variable
        for path, variable in found.items():
            if _is_apart(variable) and is_of_group(variable):
                raise ValueError(
                    f"expected an aggregation of the SyncOnRead variable at {path}, "
                    "which each group has, found NONE; give it one, or make it in the "
                    "scope of SyncGroups.everyone"
                )
        return found

    def spellings(self, path: str) -> list[str]:
        """Return the paths that files may use for a variable, preferred path first."""
        owner = self.owner(path)
        if owner is None:
            return [path]
        name = path.partition("/")[0]
        return [f"{name}/{p}" for p in owner[0].checkpoint_spellings(owner[1])]

    def unmade(
        self, missing: Collection[str], paths: Iterable[str], saved: Iterable[str]
    ) -> set[str]:
        """Return the ``missing`` paths whose variables did not exist at the save.

        ``missing`` has those of the program's ``paths`` that are not among the paths
        ``saved`` in the checkpoint. A path is returned if its object has a method
        ``checkpoint_reset``, and now has all the kinds of state (such as ``momentum``
        in ``optimizer/momentum/w``) that were saved for it.
        """
        names = {path.partition("/")[0] for path in missing}
        names = {n for n in names if hasattr(self._stateful.get(n), "checkpoint_reset")}
        if not names:
            return set()
        now, then = _kinds(paths), _kinds(saved)
        names = {name for name in names if then.get(name, set()) <= now[name]}
        return {path for path in missing if path.partition("/")[0] in names}

    def reset(self, paths: Sequence[str]) -> None:
        """Reset the variables at these paths to their values before the first step."""
        for name, thing in self._stateful.items():
            own = [p.partition("/")[2] for p in paths if p.partition("/")[0] == name]
            if own:
                owner: Any = thing
                owner.checkpoint_reset(own)

    def end_restore(
        self, num_replicas: int, now: int, only: Collection[str] | None = None
    ) -> None:
        """Pass the numbers of replicas, at the save and now, to restored objects."""
        for name, thing in self._stateful.items():
            wanted = only is None or name in only
            if wanted and isinstance(thing, SupportsDeferredCheckpoint):
                thing.checkpoint_restored(num_replicas, now)

    def target(self, path: str) -> Variable | None:
        """Return the variable on parameter servers for a saved path, or None."""
        owner = self.owner(path)
        if owner is None:
            return None
        find: Any = getattr(owner[0], "checkpoint_target", None)
        return None if find is None else find(owner[1])

    def owner(self, path: str) -> tuple[SupportsDeferredCheckpoint, str] | None:
        """Return the object that can make a path's variable, and the path in it."""
        name, _, rest = path.partition("/")
        thing = self._stateful.get(name)
        # Check for None first, because the isinstance check takes 30 us.
        if thing is None or not isinstance(thing, SupportsDeferredCheckpoint):
            return None
        return thing, rest

    @property
    def names(self) -> set[str]:
        """Names of all objects."""
        first = {path.split("/")[1] for path in self._variables}
        return first | {*self._stateful, *self.iterators, *self.python}

    def iterations(self) -> int | None:
        """Return an optimizer's number of steps, or None if there is no optimizer."""
        for thing in self._stateful.values():
            # An object that is no optimizer may have another kind of ``iterations``.
            steps = getattr(thing, "iterations", None)
            if isinstance(steps, Variable):
                return int(to_host(steps.component))
        return None

    def describe(self, variables: dict[str, Variable]) -> str:
        """Return, as text, the properties of variables that all ranks must share."""
        words = [
            f"{path} {dtype_name(v.dtype)}{list(whole_shape(v))} "
            f"{v.synchronization.name} {v.aggregation.name}"
            + ("" if v.split is None else f" split={v.split}")
            for path, v in variables.items()
        ]
        return f"{len(words)} variables: {', '.join(words)}"

    def values(self, variables: dict[str, Variable]) -> dict[str, Any]:
        """Return the value to save of each variable, by path.

        A value is combined over all replicas, or is this replica's row, or this rank's
        part. For a variable on parameter servers, it is an object that fetches pieces
        later. Collective over the strategy's replicas, and over the ranks of a replica,
        if there are SyncOnRead variables.
        """
        values: dict[str, Any] = {}
        # Each call of `read_sharded` or `read_all` needs variables of one strategy.
        here: dict[tuple[bool, bool, bool], dict[str, Any]] = {}
        for path, variable in variables.items():
            if (pieces := pieces_of(variable)) is not None:
                values[path] = pieces
                continue
            divided = variable.split is not None
            kind = is_of_group(variable), variable.is_sharded, divided
            here.setdefault(kind, {})[path] = variable
        for kind, some in sorted(here.items(), key=lambda item: item[0]):
            those, (_, is_sharded, divided) = list(some.values()), kind
            with self.strategy.inside.divided() if divided else nullcontext():
                read = (read_sharded if is_sharded else _read_own)(those)
            values.update(zip(some, read, strict=True))
        own = {p: values[p] for p, variable in variables.items() if _is_apart(variable)}
        if own:
            # Each rank of a replica writes a part of the replica's row.
            names = [f"variable {path!r}" for path in own]
            self.strategy.inside.require_whole("save", list(own.values()), names)
        return {path: values[path] for path in variables}

    def entries(
        self, variables: dict[str, Variable], values: dict[str, Any]
    ) -> dict[str, Entry]:
        """Return the file's entry for each variable, by path; ``values`` has shapes."""
        entries = {}
        for path, variable in variables.items():
            on_read = isinstance(variable, SyncOnReadVariable)
            # Save the component of each logical replica: a sum would be rounded.
            gathered = on_read and has_logical_replicas(variable)
            apart = _is_apart(variable) or gathered
            alone = apart and not gathered
            rows = (self.strategy.num_replicas_in_sync,) if alone else ()
            if of_group := is_of_group(variable):
                rows = (self.strategy.split.num_groups,)
            shape = values[path].shape
            if variable.split is not None:
                shape = whole_shape(variable)
            entries[path] = Entry(
                path,
                (*rows, *shape),
                dtype_name(variable.dtype),
                "on_read" if on_read else "on_write",
                variable.aggregation.name.lower(),
                variable.trainable,
                apart and not of_group,
                of_group,
                gathered,
                _regions(variable),
            )
        return entries

    def states(self) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
        """Return the states of datasets and random streams, and plain state as text.

        Collective over the strategy's replicas if there are random streams.
        """
        iterators = {name: thing.state() for name, thing in self.iterators.items()}
        python = {
            name: as_text(name, thing.state_dict())
            for name, thing in self.python.items()
        }
        return iterators, python

    def state_problems(
        self, header: Header, only: Collection[str] | None = None
    ) -> list[str]:
        """Return a message for each state that is missing in the file, or does not fit.

        ``only`` has the names of the objects to check; None means all objects.
        """
        problems = []
        for name, thing in self.iterators.items():
            if only is not None and name not in only:
                continue
            section = getattr(thing, "checkpoint_section", "iterators")
            state = header.iterators.get(name)
            if state is None and getattr(thing, "checkpoint_may_lack", False):
                continue
            if state is None or section_of(state) != section:
                problems.append(f"{section}/{name} is not in the checkpoint")
                continue
            try:
                thing.check_state(state)
            except ValueError as error:
                problems.append(f"{section}/{name} does not fit: {error}")
        for name in self.python:
            wanted = name not in self._optional and (only is None or name in only)
            if wanted and name not in header.python:
                problems.append(f"python/{name} is not in the checkpoint")
        return problems

    def restore_states(
        self, header: Header, only: Collection[str] | None = None
    ) -> None:
        """Restore datasets, random streams and objects with plain state."""
        for name, thing in self.iterators.items():
            there = name in header.iterators
            if there and (only is None or name in only):
                thing.restore_state(header.iterators[name])
        for name, thing in self.python.items():
            there = name in header.python
            if there and (only is None or name in only):
                thing.load_state_dict(header.python[name])


def whole_shape(variable: Variable) -> tuple[int, ...]:
    """Return the shape of a variable's value, of which a rank may have a part."""
    divided: Any = variable
    return variable.shape if variable.split is None else divided.whole_shape


def _regions(variable: Variable) -> tuple[Box, ...]:
    """Return the part of each rank of a replica if they divide a variable, or none."""
    if variable.split is None:
        return ()
    inside, whole = variable.distribute_strategy.inside, whole_shape(variable)
    return tuple(inside.region(whole, variable.split, p) for p in range(inside.size))


def own_region(variable: Variable | None) -> Box | None:
    """Return this rank's part of a variable's value, or None if it has all of it."""
    if variable is None or variable.split is None:
        return None
    inside = variable.distribute_strategy.inside
    region: Box = inside.region(whole_shape(variable), variable.split)
    return region


def _is_apart(variable: Variable) -> bool:
    none = variable.aggregation is VariableAggregation.NONE
    return none and isinstance(variable, SyncOnReadVariable)


def pieces_of(variable: Variable | None) -> Any:
    """Return access to the bytes of a variable on parameter servers, piece by piece.

    Returns None for other variables, and for bytes that must be converted for the file.
    """
    if variable is None or not variable.is_remote:
        return None
    # Files are little-endian on every machine, and no code converts pieces.
    as_stored = sys.byteorder == "little" and variable.dtype.isnative
    elsewhere: Any = variable
    return elsewhere.pieces() if as_stored else None


def _kinds(paths: Iterable[str]) -> dict[str, set[str]]:
    """Return each object's kinds of state: for ``opt/m/w``, ``{"opt": {"m"}}``."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        name, _, rest = path.partition("/")
        found[name].add(rest.partition("/")[0])
    return found


def _check_name(name: str) -> str:
    """Return the name; raise ValueError if it cannot be one name in an HDF5 path."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(
            f"expected a name of an HDF5 object, found {name!r}; use a name that is "
            "not empty, '.' or '..', and has no '/'"
        )
    return name
