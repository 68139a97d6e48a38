"""Communicators of ranks that a program chooses, also after the loss of other ranks.

The ranks first meet by messages to the first of them, so that none begins to make a
communicator before all have come. If no rank of the job has died, MPI makes the
communicator of these ranks alone (MPI-4.1, 7.4.2). After a death, MPI refuses that:
then the chosen ranks must be all living ranks, which shrink the job's communicator.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.kept_requests import keep
from hpcstrat.engine.topology.starting import expect_losses
from hpcstrat.engine.topology.survival import (
    create,
    is_loss,
    lost_ranks,
    problem_with_survival,
    revoke,
)
from hpcstrat.engine.topology.topology import Topology, start_mpi
from hpcstrat.errors import CollectiveError, RankLostError, TopologyError
from hpcstrat.safety.start.creation import Creation

__all__ = ["ChangingMembers"]

_NAP_SECONDS = 0.001
# The first rank waits so long for the launcher to report the ranks that are dead.
_TOLD_SECONDS = 2.0
# The first rank tells the others one of these.
_READY, _GO, _SHRINK, _AGAIN, _LATE, _LOST, _DIFFERENT, _OTHERS_LIVE = range(8)
_PROBLEMS = {
    _LATE: "rank {} did not come in time; see what it does",
    _DIFFERENT: "rank {} gives other ranks; give the same list on all of them",
    _OTHERS_LIVE: (
        "another rank of the job has died, and rank {} lives; after a loss, let all "
        "living ranks take part"
    ),
}


class ChangingMembers:
    """The ranks of a job, some of which form a group, and later others.

    Collective over all ranks of the job. Raises TopologyError on every rank if this MPI
    library cannot survive the loss of a rank.
    """

    def __init__(self, what: str) -> None:
        world, self._mpi = Topology.world(), start_mpi()
        self.rank, self.size = world.rank, world.size
        problem = problem_with_survival(self._mpi) if self.size > 1 else ""
        with Creation(what, Settings()) as creation:
            error = TopologyError(problem) if problem else None
            creation.meet(self._mpi, world, describe_call(what), error)
            # ``_talk`` carries messages, and is never revoked. Communicators are made
            # from ``_base``, which shrinks to the living ranks after a loss.
            self._talk: Any = world.Dup()
            self._base: Any = world.Dup()
        self._members = list(range(self.size))
        # Ranks of the job that a group knows to be dead, maybe before MPI does.
        self.dead = set[int]()
        if self.size > 1:
            expect_losses()
        for comm in (self._talk, self._base):
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._num_tags = (self._talk.Get_attr(self._mpi.TAG_UB) or 32767) + 1

    def form(self, ranks: list[int], number: int, seconds: float, what: str) -> Any:
        """Return a communicator of these ranks of the job, in this order.

        Collective over these ranks, which wait ``seconds`` for one another; ``number``
        is another one for each call. Raises RankLostError with the positions of dead
        ranks, or CollectiveError if ranks do not come or do not fit together. A call
        with other ranks may then succeed.
        """
        if len(ranks) == 1:
            return self._mpi.COMM_SELF.Dup()
        meeting = ranks, number % self._num_tags, time.monotonic() + seconds
        with Creation(what, Settings()) as creation:
            creation.join(self._mpi, ranks, what)
            told = _AGAIN
            while told == _AGAIN:
                # A death that MPI does not know yet makes the first attempt fail.
                told = self._meet(*meeting, what, problem=self._knows_of_loss())
                comm = self._made(ranks, meeting[1], shrinks=told == _SHRINK)
                made = f"communicator of {what}"
                told = self._meet(*meeting, made, problem=comm is None, made=True)
        return comm

    def confirm(self, ranks: list[int], number: int, seconds: float, what: str) -> None:
        """Wait until all ranks use their communicator of `form`; errors as there.

        A rank that leaves the group earlier, and revokes its communicators, would end
        calls of ranks that still create something on them.
        """
        until = time.monotonic() + seconds
        if len(ranks) > 1:
            tag = number % self._num_tags
            self._meet(ranks, tag, until, f"end of {what}", problem=False, made=True)

    # The meeting.

    def _meet(
        self,
        ranks: list[int],
        tag: int,
        until: float,
        what: str,
        *,
        problem: bool,
        made: bool = False,
    ) -> int:
        """Wait until all ranks have come; return _GO, _SHRINK or _AGAIN, as all do.

        ``problem`` is whether this rank knows of a death, or ``made`` no communicator.
        """
        text = f"{what} {ranks}".encode()
        own = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
        verdict, rank = self._met(ranks, tag, until, [own, problem], made)
        if verdict == _LOST:
            raise _lost_error([rank], ranks)
        if verdict in _PROBLEMS:
            raise CollectiveError(
                f"expected ranks {ranks} of the job in {what}, found that "
                f"{_PROBLEMS[verdict].format(rank)}"
            )
        return verdict

    def _met(
        self, ranks: list[int], tag: int, until: float, own: list[int], made: bool
    ) -> tuple[int, int]:
        first, *others = ranks
        try:
            if self.rank != first:
                self._tell([first], tag, *own)
                # The first rank may wait as long, and then needs time to tell it.
                later = until + 2 * _TOLD_SECONDS
                ((told, rank),) = self._hear([first], tag, later)
                if told == _READY:
                    # From here on this rank stays, so that the others can rely on it.
                    self._tell([first], tag, *own)
                    ((told, rank),) = self._hear([first], tag)
                return told, rank
            verdict = self._verdict(ranks, [own, *self._hear(others, tag, until)], made)
            if verdict[0] in (_GO, _SHRINK):
                self._tell(others, tag, _READY)
                self._hear(others, tag, max(until, time.monotonic() + _TOLD_SECONDS))
        except _AbsentError as absent:
            verdict = absent.args
        if self.rank == first:
            self._tell(others, tag, *verdict)
        return verdict

    def _verdict(
        self, ranks: list[int], heard: list[list[int]], made: bool
    ) -> tuple[int, int]:
        for rank, (text, _) in zip(ranks, heard, strict=True):
            if text != heard[0][0]:
                return _DIFFERENT, rank
        if not any(problem for _, problem in heard):
            return _GO, 0
        until = time.monotonic() + _TOLD_SECONDS
        while not made:
            lost = {self._members[index] for index in lost_ranks(self._base)}
            living = set(self._members).difference(ranks, lost)
            if not living:
                return _SHRINK, 0
            if time.monotonic() > until:
                return _OTHERS_LIVE, min(living)
            # A probe on COMM_SELF drives the progress of all communicators.
            self._mpi.COMM_SELF.Iprobe()
            time.sleep(_NAP_SECONDS)
        return _AGAIN, 0

    def _knows_of_loss(self) -> bool:
        told = not self.dead.isdisjoint(self._members)
        return told or self._base.Is_revoked() or bool(lost_ranks(self._base))

    def _tell(self, ranks: Sequence[int], tag: int, word: int, more: int = 0) -> None:
        words = np.array([word, more], np.int64)
        for rank in ranks:
            # The receive from a dead rank raises the error.
            with contextlib.suppress(self._mpi.Exception):
                keep([self._talk.Isend(words, rank, tag)])

    def _hear(
        self, ranks: Sequence[int], tag: int, until: float = math.inf
    ) -> list[list[int]]:
        """Return two numbers of each rank; raise _AbsentError if one does not come."""
        words = np.zeros((len(ranks), 2), np.int64)
        waits: dict[int, Any] = {}
        rank = ranks[0]
        try:
            for rank, row in zip(ranks, words, strict=True):
                waits[rank] = self._talk.Irecv(row, rank, tag)
            while waits:
                for rank in list(waits):
                    if waits[rank].Test():
                        del waits[rank]
                if waits and time.monotonic() > until:
                    raise _AbsentError(_LATE, min(waits))
                time.sleep(_NAP_SECONDS if waits else 0)
        except self._mpi.Exception as error:
            waits.pop(rank, None)
            if not is_loss(self._mpi, error):
                raise
            raise _AbsentError(_LOST, rank) from error
        finally:
            for request in waits.values():
                request.Cancel()
            keep(waits.values())
        return words.tolist()

    # The communicator.

    def _made(self, ranks: list[int], tag: int, *, shrinks: bool) -> Any:
        """Return a communicator, or None if a rank has died meanwhile."""
        mpi = self._mpi
        every = mpi.COMM_WORLD.Get_group()
        if shrinks:
            self._base = self._base.Shrink()
            self._base.Set_errhandler(mpi.ERRORS_RETURN)
            group = self._base.Get_group()
            self._members = list(group.Translate_ranks(None, every))
            group.Free()
        base, place = self._base, ranks.index(self.rank)
        chosen = every.Incl(ranks)
        try:
            if set(self._members) == set(ranks):
                return create(mpi, base, lambda: base.Split(0, place), survives=True)
            comm = base.Create_group(chosen, tag)
        except RankLostError:
            return None
        except mpi.Exception as error:
            if not is_loss(mpi, error, base):
                raise
            # Wake the ranks that wait for this one in MPI.
            revoke([base])
            return None
        finally:
            chosen.Free()
            every.Free()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        return comm


class _AbsentError(Exception):
    """A rank does not come: the verdict of the meeting, and the rank."""


def _lost_error(lost: list[int], ranks: list[int]) -> RankLostError:
    who = f"ranks {lost} of the job have" if lost else "a rank has"
    return RankLostError(
        f"expected ranks {ranks} of the job in a group, found that {who} died; form "
        "one of the living ranks",
        [ranks.index(rank) for rank in lost if rank in ranks],
    )
