"""Rules that choose the checkpoints that stay, and the best; without any file."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

__all__ = ["Found", "KeepBest", "KeepRules", "checked_metrics", "kept", "ranked"]

_MODES = ("min", "max")
_MOST_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the checkpoints that are best by a metric.

    Parameters
    ----------
    metric : str
        A name of ``save``'s ``metrics``.
    mode : str
        Whether the least (``"min"``) or the greatest (``"max"``) is the best. NaN is
        never best; among equal ones the earlier step is.
    count : int
        How many; at least 1.

    Raises
    ------
    ValueError
        For other values.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        """Check the values."""
        _metric_name(self.metric)
        if self.mode not in _MODES:
            raise ValueError(
                f"expected mode to be 'min' or 'max', found {self.mode!r}; take one"
            )
        object.__setattr__(self, "count", _count("count", self.count))


@dataclass(frozen=True, slots=True)
class KeepRules:
    """Rules for keeping checkpoints: those stay that any of the rules asks for.

    As `CheckpointManager` takes them; ValueError for other values.
    """

    max_to_keep: int | None = None
    keep_every: int | timedelta | None = None
    keep_best: KeepBest | None = None
    keep_for: float | timedelta | None = None

    def __post_init__(self) -> None:
        """Check the values."""
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
        # Infinity and NaN are among them.
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
        # Half of a surrogate pair is no text.
        with suppress(UnicodeEncodeError):
            length = len(name.encode())
    if not 0 < length <= _MOST_NAME_BYTES:
        raise ValueError(
            f"expected the name of a metric, found {name!r}; use text of 1 to "
            f"{_MOST_NAME_BYTES} bytes"
        )
    return str(name)


def checked_metrics(metrics: Any) -> dict[str, float]:
    """Return metrics as plain numbers, by name, sorted; else ValueError."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"expected metrics to be numbers by name, found {metrics!r}; pass a dict, "
            'such as {"val_loss": 0.25}'
        )
    found = {_metric_name(name): _number(name, v) for name, v in metrics.items()}
    # All ranks say them in a header, where the order counts.
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
    """A checkpoint, as far as the rules look at it."""

    path: str
    step: int
    # When its save began, as the file says; another host's clock may have said it.
    created_unix_ns: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def ranked(found: Sequence[Found], best: KeepBest) -> list[Found]:
    """Return the checkpoints that have a metric which is not NaN, best first."""
    sign = 1 if best.mode == "min" else -1
    values = [(sign * one.metrics.get(best.metric, math.nan), one) for one in found]
    numbers = [pair for pair in values if not math.isnan(pair[0])]
    numbers.sort(key=lambda pair: (pair[0], pair[1].step, pair[1].path))
    return [one for _, one in numbers]


def kept(found: Sequence[Found], rules: KeepRules, now_unix_ns: int) -> set[str]:
    """Return the paths that the rules keep, of all that are whole.

    That of the newest is always among them.
    """
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
    """Return the oldest, and always the next that is far enough from the last one.

    What the folder has lost by this rule does not change what it says next time.
    """
    least = _nanoseconds("keep_every", distance)
    keep: list[Found] = []
    for one in ordered:
        if not keep or one.created_unix_ns - keep[-1].created_unix_ns >= least:
            keep.append(one)
    return keep
