"""The command ``hpcstrat verify-bits``, which finds different bits of two runs."""

from __future__ import annotations

import os
from typing import Any

import click
import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.safety.divergence.step_digests import read_digests
from hpcstrat.tools.checkpoints.commands import differences

__all__ = ["verify_bits"]

_DIFFERENT = 1


@click.command("verify-bits")
@click.argument("first", type=click.Path(exists=True, dir_okay=False))
@click.argument("second", type=click.Path(exists=True, dir_okay=False))
def verify_bits(first: str, second: str) -> None:
    """Show whether two runs have the same bits, and where they first differ.

    FIRST and SECOND are two checkpoints, or two log files of the setting step_digests.
    The exit status is 1 if they differ.
    """
    try:
        if all(path.endswith(".h5") for path in (first, second)):
            text = _checkpoints(first, second)
        else:
            text = _logs(first, second)
    except (OSError, ValueError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    click.echo(text or "no difference")
    raise SystemExit(_DIFFERENT if text else 0)


def _logs(first: str, second: str) -> str:
    """Return a message on the first step that differs in two logs, or ""."""
    one, other = read_digests(first), read_digests(second)
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ValueError(
            f"expected steps that are in both logs, found {len(one)} and {len(other)} "
            "different steps; compare logs that begin at the same step"
        )
    for step in common:
        digests = one[step][0], other[step][0]
        if one[step][1] != other[step][1]:
            return (
                f"step {step}: different variables, {one[step][1]} and "
                f"{other[step][1]}; compare two runs of one program"
            )
        if digests[0] != digests[1]:
            return (
                f"step {step}: different bits in {one[step][1] or 'the variables'} at "
                f"the beginning of the step ({digests[0]} and {digests[1]})"
            )
    return ""


def _checkpoints(first: str, second: str) -> str:
    """Return a message on how two checkpoints differ; empty if they are equal."""
    steps, found = differences(first, second, _by_bits)
    lines = [f"{name}: {text}" for name, text in found]
    if lines and steps[0] != steps[1]:
        lines.insert(0, f"steps {steps[0]} and {steps[1]}")
    return os.linesep.join(lines)


def _by_bits(one: Array, other: Array) -> str:
    """Return a message on how the bits of two arrays differ, or "" if they do not."""
    raw = [np.ascontiguousarray(value).reshape(-1) for value in (one, other)]
    octets = [array.view(np.uint8).reshape(-1, array.itemsize) for array in raw]
    unequal = np.flatnonzero((octets[0] != octets[1]).any(axis=1))
    if not unequal.size:
        return ""
    place = int(unequal[0])
    index = [int(i) for i in np.unravel_index(place, one.shape)]
    text = (
        f"{unequal.size:,} of {raw[0].size:,} elements, first at {index}: "
        f"{raw[0][place]} and {raw[1][place]}"
    )
    distances = _units(raw[0][unequal], raw[1][unequal])
    if distances is not None:
        text += (
            f", {distances[0]:,} units in the last place apart; at most "
            f"{distances.max():,}"
        )
    return text


def _units(one: Array, other: Array) -> Any:
    """Return the distance of each pair of numbers, in units in the last place.

    If the bits of floating-point numbers are read as integers, the integers have the
    same order as the numbers, so the difference of two integers is the distance.
    Returns None for other types.
    """
    if one.dtype.kind == "c":
        parts = [array.view(array.real.dtype) for array in (one, other)]
        found = _units(parts[0], parts[1])
        return None if found is None else found.reshape(-1, 2).max(axis=1)
    if one.dtype.itemsize not in (2, 4, 8) or one.dtype.kind in "iub":
        return None
    whole = np.dtype(f"i{one.dtype.itemsize}")
    ordered = []
    for array in (one, other):
        bits = array.view(whole).astype(object)
        least = -(1 << (8 * whole.itemsize - 1))
        # The bits of negative numbers are in the opposite order: reverse it.
        ordered.append(np.where(bits < 0, least - bits, bits))
    return np.abs(ordered[0] - ordered[1])
