"""Compared bytes, the majority of ranks, and cases in which only variables differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcstrat.engine.channel.disagreement import FAILED, Announcement, differing
from hpcstrat.safety.divergence.first_difference import (
    REPLICAS,
    index_of,
    most_common,
    octets,
)


def test_bytes_are_those_of_the_array_itself() -> None:
    array = np.zeros((3, 4), np.float32)
    rows = octets(array)
    assert rows.shape == (12, 4)
    rows[5] = 1
    assert array[1, 1] != 0
    assert octets(np.zeros((), np.int64)).shape == (1, 8)
    assert octets(np.zeros((0, 3))).shape == (0, 8)


@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant != 63, reason="long doubles have no padding here"
)
def test_padding_of_long_doubles_is_left_out() -> None:
    assert octets(np.zeros(3, np.longdouble)).shape == (3, 10)
    assert octets(np.zeros(3, np.clongdouble)).shape == (6, 10)


@pytest.mark.parametrize(
    ("found", "reference", "ranks"),
    [
        ("abab", 0, [1, 3]),
        ("abbb", 1, [0]),
        ("aab", 0, [2]),
        ("abcc", 2, [0, 1]),
        ("ab", 0, [1]),
    ],
)
def test_most_replicas_are_the_measure(
    found: str, reference: int, ranks: list[int]
) -> None:
    assert most_common(list(found)) == (reference, ranks)


def test_places_and_replicas_as_text() -> None:
    assert repr(index_of(7, (2, 5))) == "(1, 2)"
    assert index_of(0, ()) == ()
    assert REPLICAS.names([1, 3]) == "replicas [1, 3]"
    many = REPLICAS.names(range(100))
    assert many == "100 replicas (0, 1, 2, 3, 4, 5, 6, 7, ...)"


def test_variables_are_suspected_only_in_the_same_call() -> None:
    def announced(**other: Any) -> set[str]:
        one = Announcement(0, 0, "reduce", steps=(3, 0, 0), digest=5, run_fingerprint=7)
        other = {"steps": (3, 0, 0), "digest": 5, "run_fingerprint": 8} | other
        return differing([one, Announcement(1, 0, "reduce", **other)])

    assert announced() == {"run_fingerprint"}
    assert announced(run_fingerprint=7) == set()
    assert announced(lengths=1, place=2) == {"place", "lengths", "run_fingerprint"}
    assert announced(steps=(4, 0, 0)) == {"steps", "run_fingerprint"}
    assert announced(steps=(3, 1, 0)) == {"steps", "run_fingerprint"}
    assert announced(digest=6) == {"digest", "run_fingerprint"}
    failed = [Announcement(0, 0, "reduce"), Announcement(1, FAILED, "reduce")]
    assert differing(failed) == {"flags"}
