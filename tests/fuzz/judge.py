"""Compares the results of a program's ranks with the oracle's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fuzz.driver import Outcome
from tests.fuzz.machine import ABSENT
from tests.fuzz.oracles import wants
from tests.fuzz.program import Program
from tests.fuzz.wanted import ALIKE, ANY, LOOSE, UNORDERED, Want

__all__ = ["judge"]

_TOLERANCE = {2: 4e-3, 4: 1e-5, 8: 1e-9}


def judge(program: Program, n: int, outcome: Outcome) -> str:
    """Return a description of the first error, or an empty text."""
    if outcome.failure:
        return outcome.failure
    for index, want in enumerate(wants(program, n)):
        size = len(want.values) * want.ranks_per_replica
        seen = [one[index] if index < len(one) else None for one in outcome.seen]
        problem = _outside(seen[size:]) or _judged(want, seen[:size])
        if problem:
            return f"operation {index}, {program.ops[index]!r:.300}: {problem}"
        if want.may_refuse and all(_raised(one) for one in seen[:size]):
            return ""
    return ""


def _raised(found: Any) -> bool:
    return found is not None and found[0] == "raise"


def _outside(seen: Sequence[Any]) -> str:
    strange = [one for one in seen if one != ("ok", ABSENT)]
    return f"ranks without a part in it saw {strange}" if strange else ""


def _judged(want: Want, seen: Sequence[Any]) -> str:
    if want.may_refuse and all(map(_raised, seen)):
        return ""
    if want.mode == UNORDERED:
        return _judged_rows(want, seen)
    if want.mode == ALIKE and all(map(_raised, seen)):
        return ""
    problems = []
    for rank, found in enumerate(seen):
        problem = _judged_rank(want, rank, found)
        if problem:
            problems.append(f"rank {rank} {problem}")
    values = [found[1] for found in seen if found and found[0] == "ok"]
    compared = want.alike and not problems and want.mode != LOOSE
    if compared and any(_difference(value, values[0], True) for value in values):
        problems.append(f"ranks differ in bits: {values}")
    return "; ".join(problems)


def _judged_rank(want: Want, rank: int, found: Any) -> str:
    if found is None:
        return "saw nothing"
    replica = rank // want.ranks_per_replica
    names = want.errors[replica]
    if _raised(found):
        if want.mode == LOOSE:
            return ""
        if names is None:
            return f"raised {found[1][0]}: {found[2]}"
        missing = [name for name in names if name not in found[1]]
        return f"raised no {missing}: {found[1][0]}: {found[2]}" if missing else ""
    if names is not None:
        return f"went on with {found[1]!r}, expected {names or 'an error'}"
    return _difference(found[1], want.values[replica], want.bits, want.mode == LOOSE)


def _judged_rows(want: Want, seen: Sequence[Any]) -> str:
    """Check the rows of an epoch whose order is unknown."""
    if all(map(_raised, seen)):
        return ""
    if any(map(_raised, seen)):
        return f"only some ranks raised: {seen}"
    rows = [step[0] for found in seen[:: want.ranks_per_replica] for step in found[1]]
    every = np.sort(np.concatenate(rows))
    if np.array_equal(every, want.values[0]):
        return ""
    return f"the epoch had the rows {every.tolist()}, not each of them once"


def _difference(found: Any, wanted: Any, bits: bool, loose: bool = False) -> str:
    """Return a description of the difference between a value and the right one."""
    if wanted is ANY:
        return ""
    if isinstance(wanted, (np.ndarray, np.generic)):
        if loose and isinstance(found, str):
            return ""  # Error of a thread.
        return _array_difference(found, np.asarray(wanted), bits)
    if type(found) is not type(wanted):
        return f"saw {found!r}, expected {wanted!r}"
    if isinstance(wanted, (list, tuple, dict)):
        if len(found) != len(wanted):
            return f"saw {found!r}, expected {wanted!r}"
        keys = wanted.keys() if isinstance(wanted, dict) else range(len(wanted))
        if isinstance(wanted, dict) and list(map(repr, found)) != list(
            map(repr, wanted)
        ):
            return f"saw {found!r}, expected {wanted!r}"
        parts = (_difference(found[k], wanted[k], bits, loose) for k in keys)
        return next(filter(None, parts), "")
    same = found == wanted or (found != found and wanted != wanted)
    return "" if same else f"saw {found!r}, expected {wanted!r}"


def _array_difference(found: Any, wanted: Any, bits: bool) -> str:
    if not isinstance(found, (np.ndarray, np.generic)):
        return f"saw {found!r}, expected {wanted!r}"
    value = np.asarray(found)
    text = f"saw {value!r}, expected {wanted!r}"
    if (value.dtype, value.shape) != (wanted.dtype, wanted.shape):
        return text
    if wanted.dtype.kind not in "fc" or bits:
        numbers = wanted.dtype.kind in "fc"
        return "" if np.array_equal(value, wanted, equal_nan=numbers) else text
    parts = 2 if wanted.dtype.kind == "c" else 1
    small = _TOLERANCE[wanted.dtype.itemsize // parts]
    finite = np.abs(wanted[np.isfinite(wanted)]) if wanted.size else np.zeros(1)
    scale = max(1.0, float(finite.max(initial=0)))
    near = np.allclose(*(value, wanted), rtol=small, atol=small * scale, equal_nan=True)
    return "" if near else text
