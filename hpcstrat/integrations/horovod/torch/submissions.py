"""Requests for collective calls, which each rank may submit in its own order.

A rank that waits for a request enters a collective call. In this call the ranks compare
their requests by name, and carry out the requests that all ranks have submitted, in the
same order on every rank. No request is carried out while the program computes.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from hpcstrat.engine.channel.call import describe_call
from hpcstrat.errors import CollectiveError
from hpcstrat.safety.watchdog.late_ranks import some_ranks
from hpcstrat.strategies import Strategy

__all__ = ["Submission", "Submissions"]

_MEETING = "requests of Horovod"
_SHOWN_NAMES = 4
# Horovod's own error texts, which programs may search for.
_DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as "
    "another tensor that is currently being processed.  If you want to request another "
    "tensor, use a different tensor name."
)
_SHUT_DOWN = "Horovod has been shut down before all ranks had submitted {!r}."
# A rank's report to the other ranks: the details of its requests by name, the name of
# the request that it waits for, whether it only polls, and its counts of unnamed calls.
_Told = tuple[dict[str, str], str, bool, Counter[str]]
# A function that carries out requests, given their payloads, and returns the results.
_CarryOut = Callable[["Submissions", list[Any]], list[Any]]


@dataclass(eq=False)
class Submission:
    """A request that this rank has submitted; the program receives it as a handle."""

    name: str
    # Operation, dtypes and shapes as text, which must be equal on all ranks.
    details: str
    carry_out: _CarryOut
    # This request's element in the list that is passed to `carry_out`.
    payload: Any
    # Requests with the same `carry_out` and the same key are carried out together.
    key: str
    # Converts the result that `carry_out` returned to the result for the program.
    conclude: Callable[[Any], Any]
    done: bool = False
    result: Any = None
    error: Exception | None = None
    # Time of the program's first poll of this request.
    polled_since: float | None = None

    @property
    def order(self) -> tuple[str, str, str]:
        """Sort key: requests that are carried out together become neighbors."""
        return self.carry_out.__name__, self.key, self.name

    def finish(self, result: Any = None, error: Exception | None = None) -> None:
        """Store the request's result or error, and drop its payload."""
        self.done, self.result, self.error, self.payload = True, result, error, None


class Submissions:
    """The requests that this rank has submitted and that are not carried out yet."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.collectives = strategy.collectives
        self.moves = strategy.collectives.moves
        self.parts = strategy.collectives.parts
        self._pending: dict[str, Submission] = {}
        self._unnamed: Counter[str] = Counter()

    def submit(
        self,
        kind: str,
        name: str | None,
        details: str,
        carry_out: _CarryOut,
        payload: Any = None,
        *,
        key: str = "",
        conclude: Callable[[Any], Any] = lambda result: result,
    ) -> Submission:
        """Register a request for a call; not collective."""
        if name is None:
            full = f"{kind}.noname.{self._unnamed[kind]}"
            self._unnamed[kind] += 1
        else:
            full = f"{kind}.{name}"
        if full in self._pending:
            raise ValueError(_DUPLICATE)
        request = Submission(full, details, carry_out, payload, key, conclude)
        self._pending[full] = request
        return request

    def wait(self, request: Submission) -> Any:
        """Wait for a request, and return its result; collective over all ranks."""
        while not request.done:
            self._meet(request, polls=False)
        if request.error is not None:
            raise request.error
        return request.conclude(request.result)

    def poll(self, request: Submission) -> bool:
        """Return whether a request is done; a second poll waits for the other ranks."""
        if not request.done:
            if request.polled_since is None:
                request.polled_since = time.monotonic()
            else:
                self._meet(request, polls=True)
        return request.done

    def close(self) -> None:
        """Close the strategy; a later wait for a pending request raises an error."""
        for request in self._pending.values():
            request.finish(error=CollectiveError(_SHUT_DOWN.format(request.name)))
        self._pending.clear()
        self.strategy.close()

    def _meet(self, request: Submission, *, polls: bool) -> None:
        # A collective call, so that an error on one rank is raised on all ranks.
        self.collectives.call(_MEETING, self._advance, request, polls)

    def _advance(self, awaited: Submission, polls: bool) -> None:
        """Carry out the requests that all ranks have submitted."""
        names = self._common(awaited, polls)
        # Each rank has submitted in its own order, but all ranks must carry out the
        # requests in the same order, to avoid a deadlock.
        requests = sorted((self._pending[n] for n in names), key=lambda r: r.order)
        for _, some in groupby(requests, key=lambda r: r.order[:2]):
            batch = list(some)
            try:
                results = batch[0].carry_out(self, [r.payload for r in batch])
            except Exception as error:
                self._end(batch, error)
                raise
            for request, result in zip(batch, results, strict=True):
                request.finish(result)
                del self._pending[request.name]

    def _end(self, requests: Iterable[Submission], error: Exception) -> None:
        for request in requests:
            request.finish(error=error)
            del self._pending[request.name]

    def _common(self, awaited: Submission, polls: bool) -> list[str]:
        """Return the names of requests that have equal details on all ranks."""
        channel: Any = self.collectives.channel
        if channel is None:
            return list(self._pending)
        # Ranks compare the call's digest, not its text. In errors, the text shows which
        # request each rank waits for.
        call = describe_call(_MEETING)
        call = replace(call, text=f"hvd.synchronize of {awaited.name!r}")
        channel.agree(call, self.collectives.timeout_seconds)
        own = {name: request.details for name, request in self._pending.items()}
        text = "\n".join(f"{name}\0{own[name]}" for name in sorted(own))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        # 62 bits fit into an int64, also with a minus sign.
        number = int.from_bytes(digest, "little") >> 2
        # The maxima over ranks of `number` and `-number` show the largest and the
        # smallest number, so one call shows whether all numbers are equal.
        bounds = np.array([number, -number])
        self.parts.combine(np.maximum, bounds, _MEETING)
        if bounds[0] == -bounds[1]:
            # All ranks have submitted the same requests, as is usual.
            return list(own)
        patient = polls and not self._is_overdue(awaited)
        told = self.collectives.all_gather_object(
            (own, awaited.name, patient, self._unnamed), _MEETING
        )
        return self._compared(told)

    def _is_overdue(self, polled: Submission) -> bool:
        channel: Any = self.collectives.channel
        limit = self.collectives.timeout_seconds or channel.waiter.limit_seconds
        return time.monotonic() - (polled.polled_since or 0) > limit

    def _compared(self, told: list[_Told]) -> list[str]:
        """Return names of requests that are equal on all ranks; fail unequal ones."""
        everyone = [one[0] for one in told]
        common = [n for n in everyone[0] if all(n in one for one in everyone)]
        agreed = []
        for name in common:
            if len({one[name] for one in everyone}) == 1:
                agreed.append(name)
            else:
                self._end([self._pending[name]], _mismatch(name, everyone))
        awaited = {one[1] for one in told}
        if not awaited & {*common} and not any(one[2] for one in told):
            # Each rank waits for a request that another rank has not submitted, and
            # waiting ranks submit nothing more: a deadlock. Set equal counts on all
            # ranks, so that the names of later unnamed calls match.
            self._unnamed = functools.reduce(Counter.__or__, [one[3] for one in told])
            stuck = [self._pending[name] for name in awaited & {*self._pending}]
            self._end(stuck, _deadlock(told))
        return agreed


def _mismatch(name: str, everyone: list[dict[str, str]]) -> CollectiveError:
    """Return an error that shows the ranks' different requests under one name."""
    ranks: dict[str, list[int]] = {}
    for rank, submitted in enumerate(everyone):
        ranks.setdefault(submitted[name], []).append(rank)
    found = "; ".join(
        f"{details} on {some_ranks(those)}"
        for details, those in [*ranks.items()][:_SHOWN_NAMES]
    )
    return CollectiveError(
        f"expected {name!r} to be the same call on all ranks, found {found}; make it "
        "the same, or use another name"
    )


def _deadlock(told: list[_Told]) -> CollectiveError:
    """Return an error with the awaited names, and for each the ranks that lack it."""
    waiting: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        waiting.setdefault(one[1], []).append(rank)
    found = "; ".join(
        f"{some_ranks(ranks)} for {name!r}, which "
        f"{some_ranks([r for r, one in enumerate(told) if name not in one[0]])} did "
        "not submit"
        for name, ranks in [*waiting.items()][:_SHOWN_NAMES]
    )
    return CollectiveError(
        "expected every rank to submit what the others wait for, found that all wait: "
        f"{found}; make the same calls on every rank"
    )
