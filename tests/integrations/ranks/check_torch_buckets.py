"""Buckets are started in the order of a plan, for any order of their arrays."""

from __future__ import annotations

from typing import Any

import pytest

from hpcstrat.integrations.torch.buckets import Buckets, plan_buckets


class _Started:
    """A fake reduction that the test ends or fails."""

    def __init__(self) -> None:
        self.ended, self.error = False, None

    def test(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True
        if self.error:
            raise self.error


def _made(*plan: tuple[int, ...]) -> tuple[Buckets, list[Any], list[Any]]:
    started, names = [], []

    def start(bucket: tuple[int, ...]) -> Any:
        names.append(bucket)
        started.append(_Started())
        return started[-1]

    return Buckets(plan, start), started, names


def test_buckets_are_cut_where_they_are_full() -> None:
    assert plan_buckets([3, 1, 0, 2], [4, 4, 9, 4], 8) == [(3, 1), (0, 2)]
    assert plan_buckets([0, 1, 2], [9, 9, 1], 8) == [(0,), (1,), (2,)]
    assert plan_buckets([], [1], 8) == []


def test_they_are_started_in_the_order_of_the_plan() -> None:
    buckets, _, names = _made((5, 4), (3, 2), (1,))
    for index, expected in [(3, 0), (2, 0), (4, 0), (9, 0), (5, 2), (1, 3)]:
        buckets.ready(index)
        assert len(names) == expected
    assert names == [(5, 4), (3, 2), (1,)]
    assert 2 in buckets
    assert 9 not in buckets


def test_what_is_not_complete_is_started_at_the_end() -> None:
    buckets, started, names = _made((2,), (1,), (0,))
    buckets.ready(0)
    buckets.ready(2)
    assert names == [(2,)]
    assert buckets.was_started(2)
    assert started[0].ended
    assert not buckets.was_started(1)
    buckets.start_rest()
    assert list(buckets.ended()) == names == [(2,), (1,), (0,)]
    assert all(one.ended for one in started)


def test_a_bucket_that_failed_ends_the_pass() -> None:
    buckets, started, _ = _made((1,), (0,))
    buckets.ready(1)
    started[0].ended, started[0].error = True, ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        buckets.ready(0)
