"""Output arrays that share memory are detected, for any number of arrays."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.arrays import overlaps

STEPS = (1, 1, 2, 3)


def _place(array: Any) -> tuple[Any, ...]:
    pointer = array.__array_interface__["data"][0]
    return pointer, array.shape, array.strides


def _some(rng: random.Random, matrix: Any) -> Any:
    """Return a random view of a matrix."""

    def part(length: int) -> slice:
        start = rng.randrange(length)
        return slice(
            start, rng.randint(start, min(length, start + 3)), rng.choice(STEPS)
        )

    rows, columns = matrix.shape
    view = matrix[part(rows), part(columns)]
    if rng.random() < 0.4:
        view = matrix[:, rng.randrange(columns)]
    return view[::-1] if rng.random() < 0.3 else view


@pytest.mark.parametrize("few", [0, 1, 8])
def test_what_shares_memory_is_found(monkeypatch: Any, few: int) -> None:
    monkeypatch.setattr(overlaps, "_FEW", few)
    rng = random.Random(few)
    counts = [0, 0]
    for _ in range(400):
        shape = rng.choice([6, 12]), rng.choice([5, 10])
        matrix = np.zeros(shape, rng.choice(["f8", "f4", "c16", "u1"]))
        matrix = matrix.T if rng.random() < 0.3 else matrix
        outs = [_some(rng, matrix) for _ in range(rng.randint(2, 7))]
        outs.append(rng.choice(outs))
        arrays = [o if rng.random() < 0.5 else np.ones_like(o) for o in outs]
        wanted = {
            (one, other)
            for one, other in itertools.combinations(range(len(outs)), 2)
            if np.shares_memory(outs[one], outs[other])
            and not all(_place(x[one]) == _place(x[other]) for x in (outs, arrays))
        }
        found = overlaps.overlap(outs, arrays)
        assert found in wanted if wanted else found is None
        counts[bool(wanted)] += 1
    assert min(counts) > 50


def test_not_every_two_of_many_are_compared(monkeypatch: Any) -> None:
    shared: Any = overlaps._share
    compared = []

    def share(one: Any, other: Any) -> bool:
        compared.append(one)
        return bool(shared(one, other))

    monkeypatch.setattr(overlaps, "_share", share)
    count = 500
    columns = list(np.zeros((4, count)).T)
    rows = [np.full(4, float(i)) for i in range(count)]
    strategy = hs.OneDeviceStrategy("CPU:0")
    found = strategy.reduce("sum", rows, axis=None, out=columns)
    np.testing.assert_array_equal(found, rows)
    same, one = [np.ones(4)] * count, [np.zeros(4)] * count
    strategy.reduce("sum", same, axis=None, out=one)
    np.testing.assert_array_equal(one[0], 1)
    assert not compared
    columns[7] = columns[3]
    with pytest.raises(ValueError, match=r"out\[3\] and out\[7\] share memory"):
        strategy.reduce("sum", rows, axis=None, out=columns)
    assert len(compared) <= count
