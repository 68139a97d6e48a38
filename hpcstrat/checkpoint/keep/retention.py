"""Rules that select the checkpoints to keep, and removal of the other checkpoints."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from hpcstrat.checkpoint.disk import remove
from hpcstrat.checkpoint.file.reader import (
    CheckpointFile,
    check,
    is_passing,
    open_checkpoint,
    read_root,
)
from hpcstrat.checkpoint.file.schema import list_checkpoints, step_of
from hpcstrat.checkpoint.keep.folder import NO_FILE, Identity, identity_of
from hpcstrat.engine.logs import get_logger
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "Found",
    "KeepBest",
    "KeepRules",
    "Retention",
    "best_path",
    "checked_metrics",
    "find_restorable",
    "kept",
    "newest_path",
    "ranked",
    "warn",
]

_MODES = ("min", "max")
_MOST_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Rule for a `CheckpointManager` to keep the checkpoints that are best by a metric.

    Parameters
    ----------
    metric : str
        Name of a metric in the ``metrics`` of ``save``.
    mode : str
        Whether the lowest (``"min"``) or the highest (``"max"``) value is best. NaN is
        never best. If values are equal, the earlier step is better.
    count : int
        Number of checkpoints to keep; at least 1.

    Raises
    ------
    ValueError
        If ``mode`` or ``count`` has another value, or ``metric`` is not a valid name.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for invalid values."""
        _metric_name(self.metric)
        if self.mode not in _MODES:
            raise ValueError(
                f"expected mode to be 'min' or 'max', found {self.mode!r}; take one"
            )
        object.__setattr__(self, "count", _count("count", self.count))


@dataclass(frozen=True, slots=True)
class KeepRules:
    """Rules for keeping checkpoints: a part of `CheckpointOptions`.

    A checkpoint is kept if any rule keeps it. Raises ValueError for invalid values.
    """

    max_to_keep: int | None = None
    keep_every: int | timedelta | None = None
    keep_best: KeepBest | None = None
    keep_for: float | timedelta | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for invalid values."""
        if self.max_to_keep is not None:
            advice = "pass None to keep all"
            _count("max_to_keep", self.max_to_keep, " or None", advice)
        if isinstance(self.keep_every, timedelta):
            _nanoseconds("keep_every", self.keep_every)
        elif self.keep_every is not None:
            advice = "pass a number of steps, or a datetime.timedelta"
            _count("keep_every", self.keep_every, " or None", advice)
        if self.keep_best is not None and not isinstance(self.keep_best, KeepBest):
            raise ValueError(
                f"expected keep_best to be a KeepBest or None, found "
                f'{self.keep_best!r}; pass KeepBest("val_loss")'
            )
        if self.keep_for is not None:
            _nanoseconds("keep_for", self.keep_for)


def _count(name: str, value: Any, also: str = "", advice: str = "count from 1") -> int:
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"expected {name} >= 1{also}, found {value!r}; {advice}")
    return count


def _nanoseconds(name: str, value: Any) -> int:
    try:
        if isinstance(value, timedelta):
            found = value // timedelta(microseconds=1) * 1000
        else:
            found = 0 if isinstance(value, (str, bool)) else int(float(value) * 1e9)
    except (TypeError, ValueError, OverflowError):
        # Infinity and NaN raise these errors, too.
        found = 0
    if found <= 0:
        raise ValueError(
            f"expected {name} to be a time above 0, found {value!r}; pass seconds, or "
            "a datetime.timedelta"
        )
    return found


def _metric_name(name: Any) -> str:
    length = 0
    if isinstance(name, str) and "\0" not in name:
        # Text with an unpaired surrogate cannot be encoded.
        with suppress(UnicodeEncodeError):
            length = len(name.encode())
    if not 0 < length <= _MOST_NAME_BYTES:
        raise ValueError(
            f"expected the name of a metric, found {name!r}; use text of 1 to "
            f"{_MOST_NAME_BYTES} bytes"
        )
    return str(name)


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as floats, sorted by name; raise ValueError if one is invalid."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"expected metrics to be numbers by name, found {metrics!r}; pass a dict, "
            'such as {"val_loss": 0.25}'
        )
    found = {_metric_name(name): _number(name, v) for name, v in metrics.items()}
    # Sort by name, because ranks compare the metrics as text.
    return dict(sorted(found.items()))


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (str, bytes)) and getattr(value, "shape", ()) == ():
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError(
        f"expected metric {name!r} to be one real number, found {value!r}; reduce it "
        "over examples and replicas first"
    )


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in the folder, with the properties that the rules use."""

    path: str
    step: int
    # Time when the save began, by the clock of the saving host.
    created_unix_ns: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def ranked(found: Sequence[Found], best: KeepBest) -> list[Found]:
    """Return the checkpoints that have the metric (but not NaN), best first."""
    sign = 1 if best.mode == "min" else -1
    values = [(sign * one.metrics.get(best.metric, math.nan), one) for one in found]
    numbers = [pair for pair in values if not math.isnan(pair[0])]
    numbers.sort(key=lambda pair: (pair[0], pair[1].step, pair[1].path))
    return [one for _, one in numbers]


def kept(found: Sequence[Found], rules: KeepRules, now_unix_ns: int) -> set[str]:
    """Return the paths of the checkpoints to keep, always including the newest."""
    if rules.max_to_keep is None:
        return {one.path for one in found}
    ordered = sorted(found, key=lambda one: (one.step, one.path))
    keep = ordered[-rules.max_to_keep :]
    if isinstance(rules.keep_every, timedelta):
        keep += _far_apart(ordered, rules.keep_every)
    elif rules.keep_every is not None:
        keep += [one for one in ordered if one.step % rules.keep_every == 0]
    if rules.keep_best is not None:
        keep += ranked(found, rules.keep_best)[: rules.keep_best.count]
    if rules.keep_for is not None:
        oldest = now_unix_ns - _nanoseconds("keep_for", rules.keep_for)
        keep += [one for one in found if one.created_unix_ns > oldest]
    return {one.path for one in keep}


def _far_apart(ordered: Sequence[Found], distance: timedelta) -> list[Found]:
    """Return the oldest checkpoint, and then checkpoints at least ``distance`` apart.

    After the other checkpoints were removed, a call returns the same ones again.
    """
    least = _nanoseconds("keep_every", distance)
    keep: list[Found] = []
    for one in ordered:
        if not keep or one.created_unix_ns - keep[-1].created_unix_ns >= least:
            keep.append(one)
    return keep


class Retention:
    """Removes from a folder the checkpoints that no rule keeps; replica 0 uses it."""

    def __init__(self, directory: str, rules: KeepRules) -> None:
        self.directory = directory
        self._rules = rules
        # Checkpoints that `_find` has read, with the identities of their files.
        self._known: dict[str, tuple[Identity | None, Found]] = {}
        self._distrusted: set[tuple[str, Identity | None]] = set()

    def distrust(self, paths: Sequence[str]) -> None:
        """Remember files that a restore found damaged, until they are replaced."""
        for path in paths:
            # Suppress errors: if only this rank raised one, other ranks would wait.
            with suppress(OSError):
                self._distrusted.add((path, identity_of(path)))

    def is_damaged(self, path: str) -> bool:
        """Return whether a restore would refuse a file as damaged.

        The data are not read here. Returns False if there is no file. Raises OSError if
        the file cannot be read now.
        """
        try:
            if (path, identity_of(path)) in self._distrusted:
                return True
            check(path)
        except FileNotFoundError:
            return False
        except CheckpointError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno not in (None, *NO_FILE):
                # The file cannot be read now, and may be intact.
                raise cause from None
            # A file of a newer library is not damaged.
            return isinstance(error, CorruptCheckpointError)
        return False

    def apply(self, new: Found) -> None:
        """Remove the checkpoints that no rule keeps, after a new one is on the disk.

        Damaged files are not counted or removed. After an OSError nothing is removed.
        """
        if self._rules.max_to_keep is None:
            return
        self._known[new.path] = identity_of(new.path), new
        for path in self._superfluous():
            try:
                remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                get_logger("checkpoint").warning(
                    "the old checkpoint %s could not be removed: %s", path, error
                )

    def _superfluous(self) -> list[str]:
        """Return the paths of the checkpoints to remove, oldest first."""
        # Files can rot. Before others are removed, check again the files that are kept
        # by ``max_to_keep`` and ``keep_best``, and choose again without damaged ones.
        counting = KeepRules(self._rules.max_to_keep, keep_best=self._rules.keep_best)
        found = self._find()
        while True:
            keep = kept(found, self._rules, time.time_ns())
            going = [one.path for one in found if one.path not in keep]
            if not going:
                return []
            asked = kept(found, counting, 0).union(going)
            damaged = {path for path in asked if self.is_damaged(path)}
            if not damaged:
                return going
            found = [one for one in found if one.path not in damaged]

    def _find(self) -> list[Found]:
        """Return the folder's intact checkpoints; read only new and changed files."""
        known = {}
        for path in list_checkpoints(self.directory):
            identity = identity_of(path)
            before = self._known.get(path)
            if before is not None and before[0] == identity:
                known[path] = before
                continue
            try:
                known[path] = identity, _look(path)
            except (FileNotFoundError, CheckpointError) as error:
                if is_passing(error):
                    raise
                # Ignore a file that was removed, is damaged, or is of a newer library.
                continue
        self._known = known
        return [one for _, one in known.values()]


def _find_newest(directory: str, passed_over: list[str]) -> CheckpointFile | None:
    """Return the newest checkpoint that is intact (its data are not checked), or None.

    Skip the paths in ``passed_over``, and add those of damaged files, with a warning.
    """
    for path in reversed(list_checkpoints(directory)):
        if path in passed_over:
            continue
        try:
            return open_checkpoint(path)
        except CorruptCheckpointError as error:
            warn(error)
            passed_over.append(path)
        except FileNotFoundError:
            continue  # The file was removed after it was listed.
    return None


def newest_path(directory: str) -> str | None:
    """Return the path of the newest intact checkpoint, or None if there is none."""
    found = _find_newest(directory, [])
    return None if found is None else found.path


def find_restorable(
    directory: str, path: str | None, passed_over: list[str], needed: bool = True
) -> tuple[CheckpointFile | None, list[str]]:
    """Return the checkpoint to restore (None if none), and the list ``passed_over``.

    The checkpoint is that at ``path``, or, if ``path`` is None, the newest intact one.
    ``passed_over`` has the paths of newer, damaged ones. Raises CheckpointError if
    there is no file at ``path``, or if all checkpoints are damaged, and one is
    ``needed``.
    """
    if path is not None:
        try:
            return open_checkpoint(path), passed_over
        except FileNotFoundError as error:
            raise CheckpointError(
                f"expected a checkpoint at {path}, found no such file; check the path, "
                "or leave it out to restore the newest"
            ) from error
    found = _find_newest(directory, passed_over)
    if found is None and passed_over and needed:
        raise CheckpointError(
            f"expected a checkpoint in {directory} that can be read, found "
            f"{len(passed_over)} that cannot be read; move them to another folder to "
            "start from the beginning"
        )
    return found, passed_over


def warn(error: Exception) -> None:
    """Log a warning about a checkpoint that is skipped."""
    get_logger("checkpoint").warning("%s", error)


def best_path(directory: str, best: KeepBest) -> str | None:
    """Return the path of the best intact checkpoint, or None if none has the metric."""
    found = []
    for path in list_checkpoints(directory):
        try:
            found.append(_look(path))
        except CheckpointError as error:
            if is_passing(error):
                raise
            warn(error)
        except FileNotFoundError:
            continue  # The file was removed after it was listed.
    return next((one.path for one in ranked(found, best)), None)


def _look(path: str) -> Found:
    header = read_root(path)
    return Found(path, step_of(path) or 0, header.created_unix_ns, header.metrics)
