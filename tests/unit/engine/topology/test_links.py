"""Measuring links in rounds: the pairs of each round, and links that are slow."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from hpcstrat.engine.topology.links import Link, _turns, find_outliers, partner


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 33, 64])
def test_all_pairs_meet_once_and_nobody_meets_two_in_a_round(count: int) -> None:
    met: Counter[tuple[int, int]] = Counter()
    for turn in _turns(count):
        others = [partner(place, count, turn) for place in range(count)]
        for place, other in enumerate(others):
            if other is not None:
                assert other != place
                assert others[other] == place
                met[min(place, other), max(place, other)] += 1
    # Both ranks of a pair report their link.
    assert met == Counter(2 * list(itertools.combinations(range(count), 2)))
    assert len(_turns(count)) == (count - 1 + count % 2 if count > 1 else 0)


@pytest.mark.parametrize("count", [65, 1000, 1001])
def test_of_many_hosts_each_meets_some_others_once(count: int) -> None:
    turns = _turns(count)
    assert len(turns) == (count - 1).bit_length()
    assert len(set(turns)) == len(turns)
    for place in range(count):
        met = [partner(place, count, turn) for turn in turns]
        known = [other for other in met if other is not None]
        assert len(set(known)) == len(known) >= len(turns) - 1
        for turn, other in zip(turns, met, strict=True):
            assert other is None or partner(other, count, turn) == place


def _links(**slow: float) -> list[Link]:
    """Return links of four hosts; some links are slower by these factors."""
    links = []
    for one, two in itertools.combinations(range(4), 2):
        factor = slow.get(f"link{one}{two}", 1.0)
        hosts = f"node{one}", f"node{two}"
        links.append(Link(hosts, (one, two), 2e-6 * factor, 1e10 / factor))
    return links


def test_slow_links_are_found_and_the_slowest_is_first() -> None:
    assert find_outliers(_links()) == []
    assert find_outliers(_links(link01=1.9)) == []
    found = find_outliers(_links(link01=3.0, link23=20.0))
    assert [one.link.ranks for one in found] == [(2, 3), (0, 1)]
    assert found[0].bandwidth_ratio == pytest.approx(20)
    assert found[0].latency_ratio == pytest.approx(20)
    assert found[1].others_bandwidth_bytes_per_second == 1e10


def test_a_link_is_compared_with_others() -> None:
    assert find_outliers([]) == []
    assert find_outliers(_links(link01=9.0)[:1]) == []
    # With two links, the slower one is compared with the faster one.
    found = find_outliers(_links(link01=9.0)[:2])
    assert [one.link.ranks for one in found] == [(0, 1)]
