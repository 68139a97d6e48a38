"""Restoring a commit from the ranks' memory, with the parts of lost replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcstrat.checkpoint.file.plain_state import from_text
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.checkpoint.restore.entry_matching import Match, match_entries
from hpcstrat.elastic.snapshots import Key, Snapshot
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.gpu.transfers import store
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.safety.divergence.divergence import check_mirrored
from hpcstrat.variables import rule_of

__all__ = ["Inventory", "choose", "restore_commit"]


@dataclass(frozen=True, slots=True)
class Inventory:
    """A replica's list of the commits in its memory.

    ``joined`` is the generation in which the replica became active. ``holdings`` has a
    tuple for each commit: its key, this replica's number and the number of replicas at
    the commit, and the numbers of other replicas whose parts are copied here.
    """

    joined: int
    worker: int
    holdings: list[tuple[Key, int, int, list[int]]]


@dataclass(frozen=True, slots=True)
class _Handover:
    """A plan of which replicas supply and receive the parts of a commit.

    The plan is the same on every replica. ``holders`` maps each replica that has the
    commit to the number that it had at the commit. ``newcomers`` maps each replica that
    does not have the commit to the lost replica that it replaces, or to None. ``lost``
    maps each lost replica to a replica that has a copy of its part, or to None.
    """

    holders: dict[int, int]
    newcomers: dict[int, int | None]
    lost: dict[int, int | None]

    @property
    def root(self) -> int:
        return min(self.holders)


def choose(reports: Sequence[Inventory]) -> Key | None:
    """Return the key of the newest commit that can be restored, or None."""
    keys = {holding[0] for report in reports for holding in report.holdings}
    for key in sorted(keys, reverse=True):
        # A rank that joined after this commit will receive it from another rank.
        if all(
            report.joined > key[0] or key in [h[0] for h in report.holdings]
            for report in reports
        ):
            return key
    return None


def _handover(key: Key, reports: Sequence[Inventory]) -> _Handover:
    holders: dict[int, int] = {}
    copies: dict[int, int] = {}
    num_replicas = 0
    for now, report in enumerate(reports):
        for found, replica, count, sources in report.holdings:
            if found == key and report.joined <= key[0]:
                holders[now], num_replicas = replica, count
                copies.update(dict.fromkeys(sources, now))
    missing = sorted(set(range(num_replicas)) - set(holders.values()))
    # New replicas replace lost ones in order; further new replicas replace none.
    fresh = [now for now in range(len(reports)) if now not in holders]
    replaced: list[int | None] = [*missing, *[None] * len(fresh)]
    return _Handover(
        holders,
        dict(zip(fresh, replaced, strict=False)),
        {replica: copies.get(replica) for replica in missing},
    )


def restore_commit(
    commit: Snapshot,
    key: Key,
    objects: Objects,
    strategy: Replicas,
    reports: Sequence[Inventory],
) -> None:
    """Restore all objects from the commit ``key``, which `choose` has returned.

    Collective over the strategy's replicas. On replicas that joined after the commit,
    ``commit`` is empty; it is filled with the values of another replica. A commit of
    logical replicas has the parts of all of them on each rank, so that no state is lost
    with a rank: each logical replica gets its own state, on whichever rank it now is.
    """
    handover = _handover(key, reports)
    if handover.newcomers:
        _give_to_newcomers(commit, handover, strategy)
    matches, unmade = match_entries(
        commit.header(),
        objects.variables(),
        objects,
        num_replicas=strategy.num_replicas_in_sync,
        allow_cast=False,
        expect_partial=False,
        per_replica="error" if strategy.logical else "init",
    )
    num_replicas, rows = commit.num_replicas, dict[str, Array]()
    if strategy.logical:
        for match in matches:
            match.assign(commit.arrays[match.entry.path], strategy)
    else:
        values = {path: commit.arrays[path] for path in commit.mirrored()}
        if strategy.replica_id in handover.holders:
            values.update((path, commit.arrays[path]) for path in commit.on_read())
            rows = {
                name: state["state"].reshape(-1)
                for name, state in commit.iterators.items()
                if "bit_generator" in state
            }
        _restore_lost(commit, handover, strategy, values, rows)
        for match in matches:
            _assign(match, values, strategy)
        # Replicas whose parts are lost are missing in sums: do not count them in means.
        num_replicas -= sum(keeper is None for keeper in handover.lost.values())
    objects.reset(unmade)
    objects.end_restore(num_replicas, strategy.num_replicas_in_sync)
    for name, thing in objects.iterators.items():
        if hasattr(thing, "own_state") and not strategy.logical:
            thing.restore_own_state(
                commit.iterators[name], [rows.get(name)], changed=bool(handover.lost)
            )
        else:
            thing.restore_state(commit.iterators[name])
    for name, thing in objects.python.items():
        thing.load_state_dict(from_text(commit.python[name]))
    # If restored copies differ, raise here, before the training diverges.
    check_mirrored(strategy, objects.variables())


def _give_to_newcomers(
    commit: Snapshot, handover: _Handover, strategy: Replicas
) -> None:
    """Send the state that is equal on all replicas to the ranks without the commit."""
    collectives, what = strategy.collectives, "state for newcomers"
    described = None
    if strategy.rank == handover.root:
        described = (
            commit.step,
            commit.num_replicas,
            commit.entries,
            commit.iterators,
            commit.python,
            {path: (a.dtype, a.shape) for path, a in commit.arrays.items()},
        )
    found = collectives.broadcast_object(described, handover.root, what)
    if strategy.rank not in handover.holders:
        commit.step, commit.num_replicas, commit.entries = found[:3]
        commit.iterators, commit.python = found[3:5]
        # Until `_restore_lost`, values that differ between replicas are zero.
        commit.arrays = {p: np.zeros(s, d) for p, (d, s) in found[5].items()}
    paths = list(commit.entries) if strategy.logical else commit.mirrored()
    arrays = [commit.arrays[path] for path in paths]
    given = collectives.broadcast(arrays, handover.root, what) if paths else []
    if strategy.rank not in handover.holders:
        commit.arrays.update(zip(paths, given, strict=True))


def _restore_lost(
    commit: Snapshot,
    handover: _Handover,
    strategy: Replicas,
    values: dict[str, Array],
    rows: dict[str, Array],
) -> None:
    """Restore lost replicas' parts from copies, into ``values`` and ``rows``."""
    now = strategy.replica_id
    collectives = strategy.collectives
    heirs = {lost: new for new, lost in handover.newcomers.items() if lost is not None}
    for lost, keeper in sorted(handover.lost.items()):
        if keeper is None:
            continue
        part = commit.copies.get(lost) if now == keeper else None
        part = collectives.broadcast_object(part, keeper, f"part of lost rank {lost}")
        arrays, streams = commit.unpacked(part)
        # A rank that replaces the lost rank receives the whole part. If no rank does,
        # the keeper adds lost sums to its own, so that totals are unchanged; the new
        # replica 0 gets the first replica's values; other values are lost.
        if lost in heirs:
            if now == heirs[lost]:
                values.update(arrays)
                rows.update(streams)
            continue
        for path, array in arrays.items():
            rule = rule_of(commit.entries[path].aggregation)
            if rule is None:
                continue
            first = lost == now == 0
            kept = rule.after_loss(
                values.get(path), array, keeps=now == keeper, succeeds_first=first
            )
            if kept is not None:
                values[path] = kept
    without = [
        n for n, r in handover.newcomers.items() if r is None or not _kept(handover, r)
    ]
    if without:
        _fill_newcomers(commit, handover, strategy, values, without)
    _warn_of_lost(commit, handover, strategy, without)


def _kept(handover: _Handover, lost: int) -> bool:
    return handover.lost[lost] is not None


def _fill_newcomers(
    commit: Snapshot,
    handover: _Handover,
    strategy: Replicas,
    values: dict[str, Array],
    without: list[int],
) -> None:
    """Set the values of new replicas that get no lost replica's part from a copy."""
    for path in commit.on_read():
        rule = rule_of(commit.entries[path].aggregation)
        if rule is None:
            continue
        part = rule.with_newcomers(
            strategy,
            values.get(path),
            commit.arrays[path],
            newcomers=without,
            root=handover.root,
            path=path,
        )
        if part is not None:
            values[path] = part


def _warn_of_lost(
    commit: Snapshot, handover: _Handover, strategy: Replicas, without: list[int]
) -> None:
    """Log a warning that names the values that could not be restored."""
    if strategy.replica_id != handover.root:
        return
    gone = [lost for lost in sorted(handover.lost) if not _kept(handover, lost)]
    paths: dict[str, list[str]] = {}
    for path in commit.on_read():
        paths.setdefault(commit.entries[path].aggregation, []).append(path)
    said = []
    for aggregation, names in sorted(paths.items()):
        rule, text = rule_of(aggregation), ", ".join(names)
        if rule is not None:
            said.append(rule.loss(gone, text))
        elif without:
            said.append(f"the values of replicas {gone} of {text}")
    said = [text for text in said if text]
    if said:
        get_logger("elastic").warning(
            "at step %d these values are lost: %s; elastic.run(partner_copies=True) "
            "keeps copies of them",
            commit.step,
            "; ".join(said),
        )


def _assign(match: Match, values: dict[str, Array], strategy: Replicas) -> None:
    value = values.get(match.entry.path)
    if value is None:
        # The variable of a new replica, with aggregation NONE, keeps its initial value.
        return
    if match.variable is None:
        # The owner makes the variable later, as an optimizer does in its first step.
        match.owner.checkpoint_defer(match.name, value, strategy, is_part=True)
    elif is_device(match.variable.component):
        store(match.variable.component, value)
    else:
        np.copyto(match.variable.component, value, casting="unsafe")
