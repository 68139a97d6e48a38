"""Measures latency and bandwidth of messages within hosts and between hosts.

Two ranks send messages back and forth: after each long message, several messages of 8
bytes. The latency is half of the round-trip time of a short message: the median over
the fastest short message after each long message. The bandwidth follows from the
additional time of a long message: the median over all long messages. The pairs of hosts
are scheduled like the games of a round-robin tournament, by the circle method (E.
Lucas, "Recreations mathematiques" 2, 1883, "Les jeux de demoiselles"). In each round, a
host exchanges messages with at most one other host, so that two measurements share only
the network between the hosts.
"""

from __future__ import annotations

import functools
import math
import operator
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hpcstrat.engine.topology.bounded import finish
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import CollectiveError

__all__ = ["Link", "Links", "Outlier", "find_outliers", "measure_links", "partner"]

MOST_IN_FULL = 64
"""Most workers whose pairs are all measured; all pairs of more would take minutes."""

_MIB = 1 << 20
_NBYTES = 4 * _MIB
# Size of the messages of the round trip whose time determines the number and size of
# the timed round trips.
_PROBE_BYTES = _MIB
_LONG_TRIP_SECONDS = 1.0
_PAIR_SECONDS = 0.3
_FEWEST_TRIPS, _MOST_TRIPS = 3, 15
# Number of short round trips after each long one. Only the fastest is used, because the
# others may have waited for a core.
_SHORT_TRIPS = 7
# Least share of a long message's time that is attributed to its bytes, because noise
# may make a short message as slow as a long message.
_LEAST_SHARE = 0.1
_MOST_SUSPECTS = 8
# A link is an outlier if it is slower than the other links by more than these ratios.
# Noise, and the levels of a network, cause smaller ratios.
_SLOW_BANDWIDTH, _SLOW_LATENCY = 2.0, 3.0
_LATENCY_NOISE_SECONDS = 2e-5
_LIMIT_SECONDS = 60.0
_TAG = 21
_HOST_BYTES = 64

Row = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and bandwidth between two ranks, on one host or on two."""

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    latency_seconds: float
    bandwidth_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Links:
    """The measured links of a job; the same on every rank.

    ``inside`` has one link for each worker of several ranks, from its first rank to its
    last rank. ``between`` has links between the first ranks of two workers: of all
    pairs of workers or, if ``is_sample``, of log2(num_workers) pairs for each worker.
    ``unanswered`` has the ranks of pairs whose measurement did not finish in time. Long
    messages had ``nbytes``, or 1 MiB if ``nbytes`` would have taken seconds.
    """

    inside: tuple[Link, ...]
    between: tuple[Link, ...]
    unanswered: tuple[tuple[int, int], ...]
    num_workers: int
    is_sample: bool
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict that ``json`` can write."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outlier:
    """A link that is much slower than the median of the other links."""

    link: Link
    others_latency_seconds: float
    others_bandwidth_bytes_per_second: float

    @property
    def by_bandwidth(self) -> bool:
        """Return whether the link's bandwidth is worse, by ratio, than its latency."""
        return self.bandwidth_ratio >= self.latency_ratio

    @property
    def latency_ratio(self) -> float:
        """The latency of this link divided by the median latency of the other links."""
        return self.link.latency_seconds / self.others_latency_seconds

    @property
    def bandwidth_ratio(self) -> float:
        """The median bandwidth of the other links divided by this link's bandwidth."""
        own = self.link.bandwidth_bytes_per_second
        return self.others_bandwidth_bytes_per_second / own


def find_outliers(links: Sequence[Link]) -> list[Outlier]:
    """Return the links that are much slower than the other links, the slowest first."""
    if len(links) < 2:
        return []
    latencies = np.array([link.latency_seconds for link in links])
    bandwidths = np.array([link.bandwidth_bytes_per_second for link in links])
    found = []
    for index, link in enumerate(links):
        others = (
            float(np.median(np.delete(values, index)))
            for values in (latencies, bandwidths)
        )
        outlier = Outlier(link, *others)
        lost = link.latency_seconds - outlier.others_latency_seconds
        if outlier.bandwidth_ratio > _SLOW_BANDWIDTH or (
            outlier.latency_ratio > _SLOW_LATENCY and lost > _LATENCY_NOISE_SECONDS
        ):
            found.append(outlier)
    found.sort(key=lambda one: -max(one.bandwidth_ratio, one.latency_ratio))
    return found


def measure_links(
    topology: Topology,
    *,
    nbytes: int = _NBYTES,
    limit_seconds: float = _LIMIT_SECONDS,
) -> Links:
    """Measure latency and bandwidth within workers, and between workers.

    Collective over ``topology.replica_comm``. Slow links are measured once more, one at
    a time, and the better result is used, because other traffic may have disturbed the
    first measurement. The function takes at most ``limit_seconds``, or 1.5 times as
    long if there are slow links. Raises CollectiveError if some ranks do not make this
    call, or do not finish, in time.
    """
    deadline = time.monotonic() + limit_seconds
    comm, request = topology.replica_comm.Idup()
    _await(request, deadline)
    meeting = _LinkPairs(comm, topology, nbytes, deadline)
    links = meeting.shared(meeting.play(limit_seconds), deadline)
    suspects = [one.link.ranks for one in find_outliers(links.between)]
    if suspects:
        limit_seconds /= 2
        deadline = time.monotonic() + limit_seconds
        rows = meeting.play_alone(suspects[:_MOST_SUSPECTS], limit_seconds)
        links = _with_better(links, meeting.shared(rows, deadline))
    comm.Free()
    return links


def partner(player: int, count: int, turn: int) -> int | None:
    """Return a player's partner in a round of a tournament, or None for a bye.

    ``player`` is the number of the player, and ``turn`` is the number of the round. All
    ``count`` players meet each other once in ``count - 1`` rounds if ``count`` is even,
    and in ``count`` rounds if it is odd.
    """
    # By the circle method, the last player stays in place if the number of players is
    # even, and the other players rotate.
    circle = count - 1 + count % 2
    if player == circle:
        # The last player meets the player that the rule below would match with itself:
        # 2 * other == turn, modulo the circle.
        return turn * ((circle + 1) // 2) % circle
    other = (turn - player) % circle
    if other == player:
        other = circle
    return other if other < count else None


def _turns(count: int) -> list[int]:
    """Return the rounds to measure: all, or a sample for more than 64 workers."""
    every = count - 1 + count % 2 if count > 1 else 0
    chosen = every if count <= MOST_IN_FULL else math.ceil(math.log2(count))
    return [every * index // chosen for index in range(chosen)]


def _await(request: Any, deadline: float) -> None:
    if not finish([request], deadline, naps=True):
        raise CollectiveError(
            "expected all ranks to measure their links, found that some did not come, "
            "or did not finish, in time; look at the hosts that do not answer"
        )


def _with_better(links: Links, again: Links) -> Links:
    """Return the links with the better latency and bandwidth of two measurements."""
    newer = {link.ranks: link for link in again.between}
    between = []
    for link in links.between:
        other = newer.get(link.ranks, link)
        latency = min(link.latency_seconds, other.latency_seconds)
        bandwidth = max(
            link.bandwidth_bytes_per_second, other.bandwidth_bytes_per_second
        )
        between.append(Link(link.hosts, link.ranks, latency, bandwidth))
    return replace(links, between=tuple(between))


class _LinkPairs:
    """The measurements of pairs of ranks. Collective over ``comm``.

    A row has two ranks, their latency and their bandwidth; latency and bandwidth are
    NaN if a rank did not answer in time.
    """

    def __init__(
        self, comm: Any, topology: Topology, nbytes: int, deadline: float
    ) -> None:
        self._comm, self._worker = comm, topology.worker_id
        record = np.dtype([("worker", np.int64), ("host", f"S{_HOST_BYTES}")])
        own, every = np.zeros(1, record), np.zeros(comm.size, record)
        own["worker"] = self._worker
        own["host"] = platform.node().encode()[:_HOST_BYTES]
        request = comm.Iallgather(own.view(np.uint8), every.view(np.uint8))
        _await(request, deadline)
        self._hosts = [name.decode(errors="replace") for name in every["host"]]
        workers = every["worker"]
        # The first and the last rank of each worker.
        _, self._first = np.unique(workers, return_index=True)
        self._last = comm.size - 1 - np.unique(workers[::-1], return_index=True)[1]
        # The send buffer and the receive buffer.
        self._memory = np.ones((2, max(nbytes, _PROBE_BYTES)), np.uint8)
        self._nbytes = nbytes

    def play(self, limit_seconds: float) -> list[Row]:
        """Measure this rank's links; return rows for links to higher ranks."""
        rank, start, rows = self._comm.rank, time.monotonic(), list[Row]()
        first, last = int(self._first[self._worker]), int(self._last[self._worker])
        count = len(self._first)
        turns = _turns(count) if rank == first else []
        # The rounds share 30 % of the time limit equally. The first half of the limit
        # is a reserve, because a rank that waits for a silent partner until the end of
        # a round is late for its next round.
        share = 0.3 * limit_seconds / max(1, len(turns))
        for number, turn in enumerate(turns, 1):
            other = partner(self._worker, count, turn)
            if other is not None:
                deadline = start + 0.5 * limit_seconds + number * share
                rows += self._meet(int(self._first[other]), deadline)
        if first != last and rank in (first, last):
            deadline = start + 0.9 * limit_seconds
            rows += self._meet(first + last - rank, deadline)
        return rows

    def play_alone(
        self, pairs: Sequence[tuple[int, int]], limit_seconds: float
    ) -> list[Row]:
        """Measure these links one after the other. Collective over ``comm``."""
        start, rows = time.monotonic(), list[Row]()
        for number, pair in enumerate(pairs, 1):
            if self._comm.rank in pair:
                deadline = start + 0.9 * limit_seconds * number / len(pairs)
                rows += self._meet(sum(pair) - self._comm.rank, deadline)
            _await(self._comm.Ibarrier(), start + limit_seconds)
        return rows

    def shared(self, rows: Sequence[Row], deadline: float) -> Links:
        """Gather the rows of all ranks into `Links`. Collective over ``comm``."""
        own = np.array(rows, np.float64).reshape(-1)
        size, sizes = np.array([own.size]), np.zeros(self._comm.size, np.int64)
        _await(self._comm.Iallgather(size, sizes), deadline)
        every = np.empty(sizes.sum(), np.float64)
        _await(self._comm.Iallgatherv(own, [every, sizes.tolist()]), deadline)
        first = set(self._first.tolist())
        inside, between = list[Link](), list[Link]()
        unanswered = list[tuple[int, int]]()
        for *ends, latency, bandwidth in every.reshape(-1, 4).tolist():
            one, two = map(int, ends)
            if math.isnan(latency):
                unanswered.append((one, two))
                continue
            hosts = self._hosts[one], self._hosts[two]
            link = Link(hosts, (one, two), latency, bandwidth)
            (between if two in first else inside).append(link)
        count = len(first)
        by_ranks = operator.attrgetter("ranks")
        return Links(
            tuple(sorted(inside, key=by_ranks)),
            tuple(sorted(between, key=by_ranks)),
            tuple(sorted(unanswered)),
            count,
            count > MOST_IN_FULL,
            self._nbytes,
        )

    def _meet(self, peer: int, deadline: float) -> list[Row]:
        """Measure the link to a peer, which calls this method, too.

        The lower rank returns the row, and the higher rank returns an empty list.
        """
        leads = self._comm.rank < peer
        try:
            if leads:
                return [(self._comm.rank, peer, *self._lead(peer, deadline))]
            self._follow(peer, deadline)
        except TimeoutError:
            # MPI may still write a late message into an old buffer: use new buffers.
            self._memory = self._memory.copy()
            if leads:
                return [(self._comm.rank, peer, math.nan, math.nan)]
        return []

    def _lead(self, peer: int, deadline: float) -> tuple[float, float]:
        """Send the messages of a measurement; return latency and bandwidth."""
        trip = functools.partial(self._trip, peer, deadline)
        # The first round trip waits until the peer takes part.
        trip(8, naps=True)
        probe = min(_PROBE_BYTES, self._nbytes)
        seconds = trip(probe)
        nbytes = probe
        if seconds * self._nbytes / probe < _LONG_TRIP_SECONDS:
            nbytes, seconds = self._nbytes, seconds * self._nbytes / probe
        count = min(max(int(_PAIR_SECONDS / seconds), _FEWEST_TRIPS), _MOST_TRIPS)
        self._memory[0, :8].view(np.int32)[:] = nbytes, count
        trip(8)
        long, short = list[float](), list[float]()
        for _ in range(count):
            long.append(trip(nbytes))
            short.append(min(trip(8) for _ in range(_SHORT_TRIPS)))
        half, latency = statistics.median(long) / 2, statistics.median(short) / 2
        return latency, nbytes / max(half - latency, _LEAST_SHARE * half)

    def _trip(
        self, peer: int, deadline: float, nbytes: int, naps: bool = False
    ) -> float:
        """Send a message, wait for the peer's reply, and return the round-trip time."""
        sent, received = self._memory[:, :nbytes]
        start = time.perf_counter()
        requests = [
            self._comm.Irecv(received, peer, _TAG),
            self._comm.Isend(sent, peer, _TAG),
        ]
        if not finish(requests, deadline, naps=naps):
            raise TimeoutError
        return time.perf_counter() - start

    def _follow(self, peer: int, deadline: float) -> None:
        """Echo all messages of the peer's `_lead`."""
        echo = functools.partial(self._echo, peer, deadline)
        echo(8, naps=True)
        echo(min(_PROBE_BYTES, self._nbytes))
        nbytes, count = echo(8)[:8].view(np.int32).tolist()
        for _ in range(count):
            echo(nbytes)
            for _ in range(_SHORT_TRIPS):
                echo(8)

    def _echo(self, peer: int, deadline: float, nbytes: int, naps: bool = False) -> Any:
        sent, received = self._memory[:, :nbytes]
        for call, memory in ((self._comm.Irecv, received), (self._comm.Isend, sent)):
            if not finish([call(memory, peer, _TAG)], deadline, naps=naps):
                raise TimeoutError
        return received
