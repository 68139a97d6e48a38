"""A report of how long each replica waited for the other replicas."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

__all__ = ["BINS", "ROW_BYTES", "ArrivalReport", "ReplicaArrivals"]

BINS = 28
"""Number of ranges of the histogram of waits; the last range begins at one minute."""

_MOST_AWAITED = 4
_MOST_ROWS = 24
_MOST_NAMED = 3
# A replica is reported as late only if it is behind by at least this fraction of the
# longest total wait, and by at least _NOTABLE_SECONDS.
_NOTABLE = 0.2
_NOTABLE_SECONDS = 0.001
# Without such a replica, waits are reported as uneven work from this share of the time.
_UNEVEN_SHARE = 0.1

# The fields of `ReplicaArrivals`, in order; ``awaited`` is stored as all replica
# numbers, then all seconds. Texts are truncated.
_NUMBERS = struct.Struct(f"=q48sdqqdd112s{BINS}Iqdd{_MOST_AWAITED}q{_MOST_AWAITED}d")
_CHECK = struct.Struct("=I")

ROW_BYTES = _CHECK.size + _NUMBERS.size
"""Size of `ReplicaArrivals.packed`."""


@dataclass(frozen=True, slots=True)
class ReplicaArrivals:
    """The time that one replica has waited for the other replicas.

    Waits that end within a rank's first polls, about 10 microseconds, are not counted.

    Parameters
    ----------
    replica : int
        Number of the replica.
    host : str
        Name of the host on which the replica runs.
    elapsed_seconds : float
        Time since the strategy was created.
    calls : int
        Number of collective calls.
    waits : int
        Number of calls in which this replica waited for late replicas, before any data
        was exchanged.
    waited_seconds : float
        Total time of the waits for late replicas.
    longest_seconds : float
        The longest wait for late replicas.
    longest_call : str
        Name of the call in which the longest wait happened.
    histogram : tuple of int
        Numbers of waits by duration in whole microseconds: 0, 1, 2 to 3, 4 to 7, and so
        on, by powers of two.
    data_waits : int
        Number of waits for data inside of a call, after all replicas had arrived.
    data_seconds : float
        Total time of the waits for data.
    data_longest_seconds : float
        The longest wait for data.
    awaited : tuple of (int, float)
        Pairs of a replica of the same worker that arrived last, and the seconds for
        which this replica waited for it; longest first. Only known if the strategy has
        a single worker, because arrivals are seen in its shared memory.
    """

    replica: int
    host: str
    elapsed_seconds: float
    calls: int = 0
    waits: int = 0
    waited_seconds: float = 0.0
    longest_seconds: float = 0.0
    longest_call: str = ""
    histogram: tuple[int, ...] = (0,) * BINS
    data_waits: int = 0
    data_seconds: float = 0.0
    data_longest_seconds: float = 0.0
    awaited: tuple[tuple[int, float], ...] = ()

    def packed(self) -> bytes:
        """Return these fields as bytes of fixed size, with a checksum.

        Not collective. For the library's own modules.
        """
        awaited = [*self.awaited, *[(-1, 0.0)] * _MOST_AWAITED][:_MOST_AWAITED]
        values: list[Any] = []
        for value in (*astuple(self)[:-1], *zip(*awaited, strict=True)):
            text = value.encode(errors="replace") if isinstance(value, str) else value
            values += text if isinstance(text, tuple) else [text]
        numbers = _NUMBERS.pack(*values)
        return _CHECK.pack(zlib.crc32(numbers)) + numbers

    @classmethod
    def unpacked(cls, data: bytes) -> ReplicaArrivals | None:
        """Return the object from its `packed` bytes, or None if the checksum is wrong.

        Not collective. For the library's own modules.
        """
        numbers = data[_CHECK.size : ROW_BYTES]
        if _CHECK.unpack_from(data)[0] != zlib.crc32(numbers):
            return None
        # A truncated text may end in the middle of a UTF-8 character.
        values: list[Any] = [
            v.rstrip(b"\0").decode(errors="ignore") if isinstance(v, bytes) else v
            for v in _NUMBERS.unpack(numbers)
        ]
        rest = values[8 + BINS :]
        pairs = zip(rest[3 : 3 + _MOST_AWAITED], rest[-_MOST_AWAITED:], strict=True)
        awaited = tuple(
            (replica, seconds) for replica, seconds in pairs if replica >= 0
        )
        values[8:] = [tuple(values[8 : 8 + BINS]), *rest[:3], awaited]
        return cls(*values)


@dataclass(frozen=True, slots=True)
class ArrivalReport:
    """The times that replicas have waited for each other; ``str`` returns a table.

    A late replica waits less than the other replicas, because the sum of computing and
    waiting is the same for all replicas.

    Parameters
    ----------
    replicas : tuple of ReplicaArrivals
        One element for each replica of the strategy, in order, or for each replica
        whose numbers can be read.
    """

    replicas: tuple[ReplicaArrivals, ...]

    def __len__(self) -> int:
        return len(self.replicas)

    def __getitem__(self, index: int) -> ReplicaArrivals:
        return self.replicas[index]

    def __iter__(self) -> Iterator[ReplicaArrivals]:
        return iter(self.replicas)

    @property
    def waited_seconds(self) -> float:
        """The average over replicas of the time waited for late replicas."""
        return math.fsum(r.waited_seconds for r in self.replicas) / len(self.replicas)

    @property
    def share(self) -> float:
        """The fraction of the elapsed time lost by waiting, on average."""
        elapsed = max(r.elapsed_seconds for r in self.replicas)
        return self.waited_seconds / elapsed if elapsed else 0.0

    def behind_seconds(self, replica: ReplicaArrivals) -> float:
        """Return by how much a replica was later than the quickest, summed over calls.

        Not collective.

        Parameters
        ----------
        replica : ReplicaArrivals
            An element of this report.

        Returns
        -------
        float
            Seconds.
        """
        most = max(r.waited_seconds for r in self.replicas)
        return most - replica.waited_seconds

    def slowest(self) -> tuple[ReplicaArrivals, ...]:
        """Return the replicas for which the other replicas waited, slowest first.

        Not collective.

        Returns
        -------
        tuple of ReplicaArrivals
            Empty if all replicas waited about equally long.
        """
        ordered = sorted(self.replicas, key=self.behind_seconds, reverse=True)
        worst = self.behind_seconds(ordered[0])
        most = max(r.waited_seconds for r in self.replicas)
        if worst < max(_NOTABLE * most, _NOTABLE_SECONDS):
            return ()
        late = [r for r in ordered if self.behind_seconds(r) > worst / 2]
        # If more than half of the replicas look late, a few replicas are early instead:
        # return only the latest replica.
        return tuple(late) if 2 * len(late) <= len(ordered) else tuple(late[:1])

    def awaited(self) -> dict[int, float]:
        """Return how long replicas waited for each replica that arrived last.

        Not collective.

        Returns
        -------
        dict of int to float
            Seconds, summed over all waiting replicas, by the number of the replica that
            arrived last.
        """
        totals: dict[int, float] = {}
        for row in self.replicas:
            for replica, seconds in row.awaited:
                totals[replica] = totals.get(replica, 0.0) + seconds
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))

    def sentence(self) -> str:
        """Return the most important numbers as one line of text.

        Not collective.

        Returns
        -------
        str
            The late replicas, and the cost of waiting.
        """
        # Importing statistics at the top would make the library's import 10 % slower.
        from statistics import median

        waited = sorted(r.waited_seconds for r in self.replicas)
        elapsed = max(r.elapsed_seconds for r in self.replicas)
        calls = max(r.calls for r in self.replicas)
        parts = [
            f"the replicas waited for late ones {self.share:.0%} of {elapsed:.4g} s, "
            f"in {calls} collective calls (median {median(waited):.3g} s, "
            f"most {waited[-1]:.3g} s, least {waited[0]:.3g} s)"
        ]
        late = self.slowest()
        if late:
            parts.append(f"late: {self._named(late)}")
        elif self.share >= _UNEVEN_SHARE:
            parts.append(
                "no replica is behind the others in total: they are late in turn, by "
                "uneven work or other programs; if rows differ in cost, pass "
                "Dataset.batch(costs=...) or GlobalBatchSampler(costs=...)"
            )
        longest = max(self.replicas, key=lambda r: r.longest_seconds)
        if longest.waits:
            parts.append(
                f"longest wait: {longest.longest_seconds:.3g} s, by replica "
                f"{longest.replica} in {longest.longest_call}"
            )
        return "; ".join(parts)

    def _named(self, late: Sequence[ReplicaArrivals]) -> str:
        awaited = self.awaited()
        total = sum(awaited.values())
        words = []
        for row in late[:_MOST_NAMED]:
            text = f"replica {row.replica} on {row.host}"
            text += f" ({self.behind_seconds(row):.3g} s behind the quickest"
            if total and awaited.get(row.replica):
                text += f", waited for in {awaited[row.replica] / total:.0%} of it"
            words.append(f"{text})")
        if len(late) > _MOST_NAMED:
            words.append(f"and {len(late) - _MOST_NAMED} more")
        return ", ".join(words)

    def __str__(self) -> str:
        """Return `sentence`, and a table of the replicas, slowest first."""
        width = max(4, *(len(r.host) for r in self.replicas))
        lines = [
            self.sentence(),
            f"{'replica':>7}  {'host':<{width}} {'calls':>9} {'waits':>9} "
            f"{'waited s':>9} {'behind s':>9} {'longest s':>9} {'data s':>9}",
        ]
        # List the replica that waits least first: the other replicas wait for it.
        ordered = sorted(self.replicas, key=lambda r: r.waited_seconds)
        for row in ordered[:_MOST_ROWS]:
            lines.append(
                f"{row.replica:>7}  {row.host:<{width}} {row.calls:>9} {row.waits:>9} "
                f"{row.waited_seconds:>9.4g} {self.behind_seconds(row):>9.4g} "
                f"{row.longest_seconds:>9.4g} {row.data_seconds:>9.4g}"
            )
        if len(ordered) > _MOST_ROWS:
            lines.append(f"and {len(ordered) - _MOST_ROWS} that waited longer")
        return "\n".join(lines)
