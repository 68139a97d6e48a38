"""Matching of saved values with the program's variables, and copying to variables."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.checkpoint.agreement import is_of_group
from hpcstrat.checkpoint.file.division import Box, Division, of_regions
from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.checkpoint.file.image import Elsewhere, is_elsewhere
from hpcstrat.checkpoint.file.schema import (
    Entry,
    Header,
    dtype_name,
    named_dtype,
    saved_dtype,
    section_of,
)
from hpcstrat.checkpoint.objects import Objects, own_region, pieces_of, whole_shape
from hpcstrat.engine.arrays.casting import (
    assign,
    call_without_fp_warnings,
    is_half,
    rounded,
)
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.gpu.transfers import Uploads, store
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.options import VariableAggregation
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import CheckpointMismatchError
from hpcstrat.variables import (
    ShardedVariable,
    SyncOnReadVariable,
    Variable,
    rule_of,
)
from hpcstrat.variables.aggregation_rules import AggregationRule

__all__ = [
    "Match",
    "Sink",
    "is_wanted",
    "live_bytes",
    "match_entries",
    "renamed",
    "value_of",
]

_OF_GROUPS = "has a value for each group of replicas, but the variable needs one value"
_POLICIES = ("error", "first", "cycle", "init")


@dataclass(slots=True)
class Match:
    """A saved value and the variable that receives it."""

    entry: Entry
    # None if the variable does not exist yet; then ``owner`` will make it, as ``name``.
    variable: Variable | None
    owner: Any = None
    name: str = ""
    # Rule for rows that were saved by another number of replicas than there is now.
    per_replica: str = "error"

    @property
    def own(self) -> Box | None:
        """This rank's part of the saved value, if it does not need all of it."""
        return None if self.entry.has_rows else own_region(self.variable)

    def assign_whole(self, value: Array, strategy: Replicas) -> None:
        """Copy the saved value, or this rank's part of it, to the variable."""
        own = self.own
        self.assign(value if own is None else value[own], strategy)

    def assign(self, value: Array, strategy: Replicas) -> None:
        """Copy the saved value to this rank's components of the variable.

        The value of a divided variable is only this rank's part."""
        if not self.entry.has_rows:
            self._place(value, strategy)
        elif self._has_components:
            self._assign_components(value, strategy)
        else:
            for index, row in enumerate(self.rows(strategy)):
                if row is not None:
                    self.assign_row(value[row], strategy, index)

    @property
    def _has_components(self) -> bool:
        """True if each saved row is the component of one logical replica."""
        return self.entry.per_replica and self.entry.aggregation != "none"

    def _assign_components(self, value: Array, strategy: Replicas) -> None:
        """Copy the saved components of logical replicas to this rank's components.

        If the number of replicas has changed, combine the saved components first.
        """
        variable, rows = self.variable, len(value)
        same = rows == strategy.num_replicas_in_sync
        if isinstance(variable, SyncOnReadVariable) and same:
            first = strategy.local_replicas.start
            for index, component in enumerate(variable.components):
                _store(component, rounded(value[first + index], variable.dtype))
            return
        rule = rule_of(self.entry.aggregation)
        assert rule is not None
        total, own = rule.combine_saved(value), own_region(variable)
        self._place(total if own is None else total[own], strategy)

    def assign_row(self, row: Array, strategy: Replicas, index: int = 0) -> None:
        """Copy a saved row to the component with this index on this rank."""
        variable = self.variable
        if self.entry.per_replica and variable is not None:
            _store(variable.components[index], rounded(row, variable.dtype))
            return
        # All replicas of a group have the same value: place it by the group's strategy.
        self._place(row, strategy.split.part if self.entry.per_group else strategy)

    def _place(self, value: Array, strategy: Replicas) -> None:
        """Copy a value to this rank's components, or to each its share of the value."""
        variable = self.variable
        if variable is None:
            self.owner.checkpoint_defer(self.name, value, strategy)
            return
        tells = strategy.replica_id == 0 if self.own else strategy.writes
        if value.dtype != variable.dtype and tells:
            _tell_losses(self.entry.path, value, variable.dtype)
        if variable.is_remote:
            variable.assign(rounded(value, variable.dtype))
            return
        if isinstance(variable, ShardedVariable):
            _store(variable.component, variable.own_part(value))
            return
        first, rule = strategy.local_replicas.start, self._dividing_rule
        for replica, component in enumerate(variable.components, first):
            part = value
            if rule is not None:
                # Cast before dividing: shares cast one by one may not add up.
                cast = rounded(value, variable.dtype)
                part = rule.part(cast, strategy.num_replicas_in_sync, replica)
            _store(component, part)

    @property
    def _dividing_rule(self) -> AggregationRule | None:
        # The rule by which a saved total is divided into replicas' shares, or None.
        if not isinstance(self.variable, SyncOnReadVariable):
            return None
        rule = rule_of(self.variable.aggregation)
        return rule if rule is not None and rule.divides else None

    @property
    def divides(self) -> bool:
        """True if a restore does not copy the whole saved value to one component."""
        variable = self.variable
        several = variable is not None and (
            variable.is_sharded or len(variable.components) > 1
        )
        return several or self._dividing_rule is not None or self.entry.has_rows

    def takes_one_row(self, strategy: Replicas) -> bool:
        """Return whether this rank needs only one of the saved rows."""
        several = self._has_components or len(strategy.local_replicas) > 1
        return self.entry.has_rows and not several

    def rows(self, strategy: Replicas) -> list[int | None]:
        """Return the index of the saved row, or None, for each replica of this rank."""
        saved = self.entry.shape[0]
        own, count = list(strategy.local_replicas), strategy.num_replicas_in_sync
        if self.entry.per_group:
            own, count = [strategy.split.own], strategy.split.num_groups
        if saved == count:
            return list(own)
        # "error" does not occur here, because `match_entries` has raised.
        chosen = {"first": [0 for _ in own], "cycle": [n % saved for n in own]}
        return list(chosen.get(self.per_replica, [None for _ in own]))


def _tell_losses(path: str, value: Array, dtype: np.dtype[Any]) -> None:
    """Log a warning if ``dtype`` cannot represent some values; rounding is allowed."""
    cast = rounded(value, dtype)
    if is_half(dtype) or dtype.kind in "fc":
        lost = np.isfinite(value) & ~np.isfinite(cast)
    else:
        # A value is lost if casting it to the new type and back changes it.
        lost = rounded(cast, value.dtype) != value
    if lost.any():
        first = value[lost][0]
        get_logger("checkpoint").warning(
            "restored %s as %s, which cannot represent %d of its %d saved values, such "
            "as %s; restore it into a variable of %s, or check the restored values",
            *(path, dtype, np.count_nonzero(lost), value.size, first, value.dtype),
        )


def _store(component: Array, value: Array) -> None:
    # Write in place, because the program may have views of the component.
    if is_device(component):
        store(component, value)
    else:
        call_without_fp_warnings(assign, component, ..., value)


def match_entries(
    header: Header,
    variables: dict[str, Variable],
    objects: Objects,
    *,
    allow_cast: bool,
    expect_partial: bool,
    per_replica: str,
    num_replicas: int,
    num_groups: int = 0,
    only: Collection[str] | None = None,
) -> tuple[list[Match], list[str]]:
    """Find the saved value for every variable; the result is the same on every rank.

    Returns two lists: matches, and paths for `Objects.reset`. There is a match for each
    variable, and for each value that an object keeps until it makes the variable. The
    numbers are those of this run; the other keyword arguments are those of
    `CheckpointManager.restore`. Raises ValueError for an unknown ``per_replica``, and
    CheckpointMismatchError with a list of everything that does not fit.
    """
    if per_replica not in _POLICIES:
        raise ValueError(
            f"expected per_replica to be one of {', '.join(_POLICIES)}, found "
            f"{per_replica!r}; choose one"
        )
    rows_misfit = partial(
        _rows_misfit,
        num_replicas=num_replicas,
        num_groups=num_groups,
        chooses=per_replica != "error",
    )
    # Report all problems in one error: after each error, the job must start again.
    matches, problems, unused, missing = [], [], [], []
    wanted = {path: v for path, v in variables.items() if is_wanted(path, only)}
    taken = set()
    for path, variable in wanted.items():
        saved = [p for p in objects.spellings(path) if p in header.entries]
        entry = header.entries[saved[0]] if saved else None
        taken.update(saved[:1])
        if entry is None:
            missing.append(path)
            continue
        problem = _misfit(entry, variable, allow_cast) or rows_misfit(entry)
        if problem:
            problems.append(f"{path} {problem}")
        matches.append(Match(entry, variable, per_replica=per_replica))
    unmade = objects.unmade(missing, variables, header.entries)
    problems += [f"{p} is not in the checkpoint" for p in missing if p not in unmade]
    others = header.entries.keys() - taken
    # Sort the paths, so that objects receive values in the same order on all replicas.
    for path in sorted(path for path in others if is_wanted(path, only)):
        owner = objects.owner(path)
        if owner is None:
            unused.append(path)
            continue
        entry, target = header.entries[path], objects.target(path)
        misfit = "" if target is None else _misfit(entry, target, allow_cast)
        if problem := misfit or rows_misfit(entry):
            problems.append(f"{path} {problem}")
        matches.append(Match(entry, target, *owner, per_replica=per_replica))
    problems += objects.state_problems(header, only)
    if unused and not expect_partial:
        problems.append(
            f"no object restores {', '.join(unused)} (pass expect_partial=True)"
        )
    if problems:
        raise CheckpointMismatchError(
            f"expected the checkpoint of step {header.step} to fit the program, found "
            f"that {'; '.join(problems)}; nothing was restored: restore it into the "
            "program that saved it, or change the variables"
        )
    return matches, sorted(unmade)


def is_wanted(path: str, only: Collection[str] | None) -> bool:
    """Return whether a path belongs to an object in ``only`` (None means all objects).

    In ``net/w`` and in ``variables/net/w``, ``net`` is the object.
    """
    if only is None:
        return True
    first, _, rest = path.partition("/")
    return (rest.partition("/")[0] if first == "variables" else first) in only


def renamed(header: Header, names: Mapping[str, str]) -> Header:
    """Return a header with the program's paths; ``names`` maps saved paths to these.

    The result is the same on every rank. ``Entry.path`` is still the path in the file.
    Raises CheckpointMismatchError if a key of ``names`` is not in the checkpoint, or if
    two values get the same path.
    """
    used: set[str] = set()

    def _new(path: str) -> str:
        parts = path.split("/")
        # If several keys are beginnings of the path, use the longest key.
        for count in range(len(parts), 0, -1):
            head = "/".join(parts[:count])
            if head in names:
                used.add(head)
                return "/".join([names[head], *parts[count:]])
        return path

    found = Header(header.step, header.num_replicas)
    problems = []
    for path, entry in header.entries.items():
        if found.entries.setdefault(_new(path), entry) is not entry:
            problems.append(f"two values get the name {_new(path)}")
    for name, state in header.iterators.items():
        section = section_of(state)
        found.iterators[_new(f"{section}/{name}").removeprefix(f"{section}/")] = state
    for name, state in header.python.items():
        found.python[_new(f"python/{name}").removeprefix("python/")] = state
    unknown = sorted(names.keys() - used)
    if unknown:
        problems.append(f"{', '.join(unknown)} is not in the checkpoint")
    if problems:
        raise CheckpointMismatchError(
            f"expected rename to use names in the checkpoint of step {header.step}, "
            f"found that {'; '.join(problems)}; nothing was restored: see its names "
            "with `hpcstrat ckpt show`"
        )
    return found


def _rows_misfit(
    entry: Entry, *, num_replicas: int, num_groups: int, chooses: bool
) -> str:
    if entry.per_group and not num_groups:
        return _OF_GROUPS
    if entry.per_replica and entry.aggregation != "none":
        # Components are combined, and can be divided among any number of replicas.
        return ""
    count, what = num_replicas, "replicas"
    if entry.per_group:
        count, what = num_groups, "groups"
    if not entry.has_rows or chooses or entry.shape[0] == count:
        return ""
    return (
        f"has a value for each of {entry.shape[0]} {what}, not of {count} "
        "(pass per_replica='first', 'cycle' or 'init')"
    )


def _misfit(entry: Entry, variable: Variable, allow_cast: bool) -> str:
    shape = entry.shape
    if entry.per_group:
        if not is_of_group(variable):
            return _OF_GROUPS
        shape = shape[1:]
    if entry.per_replica:
        none = variable.aggregation is VariableAggregation.NONE
        apart = isinstance(variable, SyncOnReadVariable) and none
        if entry.aggregation == "none" and not apart:
            return "has a value for each replica, but the variable needs one value"
        shape = shape[1:]
    if shape != (wanted := whole_shape(variable)):
        return f"has shape {shape}, not {wanted}"
    if entry.dtype != dtype_name(variable.dtype) and not allow_cast:
        return f"has dtype {entry.dtype}, not {variable.dtype} (pass allow_cast=True)"
    return ""


class Sink:
    """The target of a restore for the bytes of one dataset.

    If ``live`` (the variable's memory) is given, bytes are copied directly to it. If
    not, they are collected in a buffer, whose value is assigned when it is complete.
    Of a divided variable's bytes, only those of this rank's part are copied.
    """

    def __init__(
        self, match: Match, extent: Extent, live: Array | Elsewhere | None = None
    ) -> None:
        self.match, self.extent = match, extent
        self.on_device = is_device(live)
        self.elsewhere = live if is_elsewhere(live) else None
        self._live: Any = None if is_elsewhere(live) else live
        self._collected: Array | None = None
        self._left = extent.nbytes
        self._division: Division | None = None
        # The shape of the bytes to collect.
        self._shape: tuple[int, ...] = (extent.nbytes,)
        if (own := match.own) is not None:
            shape = match.entry.shape
            itemsize = extent.nbytes // math.prod(shape)
            self._division = of_regions(shape, itemsize, [own], 1)
            self._shape = (*(each.stop - each.start for each in own), itemsize)

    @property
    def is_divided(self) -> bool:
        """True if this rank needs only a part of the bytes."""
        return self._division is not None

    def put(
        self,
        start: int,
        data: Array,
        strategy: Replicas,
        uploads: Uploads | None = None,
    ) -> None:
        """Copy ``data``, the bytes of the file from offset ``start``, to the target.

        ``uploads`` copies to a GPU, and is necessary if the sink is ``on_device``.
        """
        place = start - self.extent.offset
        if self.elsewhere is not None:
            self.elsewhere.write_bytes(place, data)
            return
        if self._live is None and self._collected is None:
            # Allocate only now, so that few values have buffers at the same time.
            self._collected = np.empty(self._shape, np.uint8)
        target = self._collected if self._live is None else self._live
        assert target is not None
        if self._division is not None:
            self._put_part(self._division, target.reshape(self._shape), place, data)
        elif self.on_device:
            assert uploads is not None
            uploads.put(data, target[place : place + data.size])
        else:
            target[place : place + data.size] = data
        self._left -= data.size
        if self._left == 0 and self._collected is not None:
            shape = None if self._division is None else self._shape[:-1]
            value = value_of(self.match, self._collected.reshape(-1), shape)
            self.match.assign(value, strategy)
            self._collected = None

    @staticmethod
    def _put_part(division: Division, target: Array, place: int, data: Array) -> None:
        """Copy the bytes of this rank's part from ``data``, which begins at a place."""
        own = division.part_of[0]
        for overlap in division.overlaps(own, place, place + data.size):
            there = data[overlap.place].reshape(overlap.shape)[overlap.there]
            target[overlap.here] = there


def value_of(
    match: Match, data: Array | None, shape: tuple[int, ...] | None = None
) -> Array:
    """Return saved bytes as an array; ``shape`` is that of a row or another part."""
    dtype = named_dtype(match.entry.dtype)
    stored = saved_dtype(dtype)
    raw = np.empty(0, np.uint8) if data is None else data
    native = raw.view(stored).astype(stored.newbyteorder("="), copy=False)
    return native.view(dtype).reshape(match.entry.shape if shape is None else shape)


def live_bytes(match: Match) -> Array | Elsewhere | None:
    """Return a variable's memory as bytes, or None if saved bytes must be converted."""
    variable = match.variable
    if variable is None or match.divides or sys.byteorder != "little":
        return None
    if variable.is_remote:
        same = dtype_name(variable.dtype) == match.entry.dtype
        found: Elsewhere | None = pieces_of(variable) if same else None
        return found
    component = variable.component
    fits = (
        dtype_name(component.dtype) == match.entry.dtype
        and component.dtype.isnative
        and component.flags.c_contiguous
        and not (match.own is not None and is_device(component))
    )
    return component.reshape(-1).view(np.uint8) if fits else None
