"""The pool of a job's ranks: active ranks, spare ranks, and lost ranks.

At the start, and after each loss, all living ranks hold a meeting: they shrink the
pool's communicator to the living ranks, exchange descriptions of themselves, and agree
that all of them have received all descriptions. If a rank dies meanwhile, the meeting
is repeated, so that all ranks have the same list.
"""

from __future__ import annotations

import functools
import glob
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcstrat.engine.topology.survival import (
    GARBLED,
    create,
    is_loss,
    lost_ranks,
    problem_with_survival,
    revoke,
)
from hpcstrat.errors import RankLostError, TopologyError

__all__ = ["Meeting", "Member", "Pool"]

_NAP_SECONDS = 0.002
_LOOK_SECONDS = 0.05
_RELEASED = 1


@dataclass(frozen=True, slots=True)
class Member:
    """A rank's description of itself for a meeting; ``rank`` is its number in the job.

    ``node`` is for choosing a spare rank on a lost rank's node. ``returned`` is whether
    the rank's training function has returned.
    """

    rank: int
    node: str
    pid: int
    returned: bool


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of a meeting of all living ranks; ranks are numbers in the job.

    ``generation`` counts meetings. ``comm`` has the active ranks, and is None on a
    spare rank. ``active`` is in the order of replicas. ``lost`` has the ranks that died
    since the last meeting; ``num_lost`` counts all ranks lost so far. ``finished`` is
    True if the training function has returned on all active ranks.
    """

    generation: int
    comm: Any
    active: tuple[int, ...]
    lost: tuple[int, ...]
    num_lost: int
    finished: bool


class Pool:
    """All ranks of a job; the last ``spare_ranks`` ranks wait for a rank to be lost.

    Collective over all ranks of the job. Raises TopologyError on every rank if this MPI
    library cannot survive the loss of a rank.
    """

    def __init__(self, mpi: Any, world: Any, spare_ranks: int) -> None:
        if not 0 <= spare_ranks < world.size:
            raise ValueError(
                f"expected 0 <= spare_ranks < {world.size}, the number of ranks, found "
                f"{spare_ranks}; start more ranks, or keep fewer spare"
            )
        self._mpi = mpi
        self._comm = world
        self._alone = world.size == 1
        self._rank = world.rank
        self._size = world.size
        self._generation = 0
        # The active rank of each replica, by the replica's number.
        self._places: dict[int, Member] = {}
        self._num_places = world.size - spare_ranks
        self._members: dict[int, Member] = {}
        if not self._alone:
            # Check without messages, because ranks may already be lost.
            problem = problem_with_survival(mpi)
            if problem:
                raise TopologyError(problem)

    def meet(self, returned: bool = False) -> Meeting:
        """Hold a meeting: agree on the ranks that live, and on the active ranks.

        Collective over all living ranks of the job; ranks in `wait` are woken. The
        result is the same on every rank, except for ``comm``. ``returned`` is whether
        this rank's training function has returned.
        """
        own = Member(self._rank, platform.node(), os.getpid(), returned)
        if self._alone:
            # At the first meeting, the training has not begun.
            finished = self._generation > 0 and returned
            self._generation += 1
            return Meeting(self._generation, self._comm, (0,), (), 0, finished)
        if self._generation:
            # Wake spare ranks, and ranks whose calls have not found the loss yet.
            revoke([self._comm])
        members, places, active = self._agreed(functools.partial(self._exchange, own))
        return self._conclude(members, places, active)

    def living(self, word: str = "") -> dict[int, str]:
        """Agree on the living ranks; return the ``word`` that each has passed, by rank.

        Collective over all living ranks of the job.
        """
        if self._alone:
            return {0: word}
        told = self._rank, word
        found: dict[int, str] = dict(self._agreed(lambda comm: comm.allgather(told)))
        self._members = {rank: self._members[rank] for rank in found}
        return found

    def _agreed(self, exchange: Callable[[Any], Any]) -> Any:
        """Call ``exchange`` on the living ranks; repeat it if a rank dies meanwhile."""
        while True:
            comm = self._comm = self._comm.Shrink()
            # With this error handler, a loss raises an exception instead of an abort.
            comm.Set_errhandler(self._mpi.ERRORS_RETURN)
            result, heard = None, False
            try:
                result = exchange(comm)
                heard = True
            except RankLostError:
                pass
            except (self._mpi.Exception, *GARBLED) as error:
                if not is_loss(self._mpi, error, comm):
                    raise
                revoke([comm])
            try:
                heard = bool(comm.Agree(int(heard)))
            except self._mpi.Exception as error:
                if not is_loss(self._mpi, error):
                    raise
                heard = False
            # ``Agree`` returns the same on all living ranks: all return, or all repeat.
            if heard:
                return result
            revoke([comm])

    def _exchange(
        self, own: Member, comm: Any
    ) -> tuple[list[Member], dict[int, Member], Any]:
        """Gather all members, assign their places, and make the active communicator."""
        members = comm.allgather(own)
        places = self._assigned(members)
        numbers = {member.rank: place for place, member in places.items()}
        place = numbers.get(self._rank)
        color = self._mpi.UNDEFINED if place is None else 0
        split = functools.partial(comm.Split, color, place or 0)
        return members, places, create(self._mpi, comm, split, survives=True)

    def _conclude(
        self, members: list[Member], places: dict[int, Member], active: Any
    ) -> Meeting:
        present = {member.rank: member for member in members}
        before = self._members
        lost = tuple(rank for rank in sorted(before) if rank not in present)
        trained = [m for m in members if m.rank in self._active()]
        finished = bool(trained) and all(member.returned for member in trained)
        _clean_up([before[rank] for rank in lost])
        self._members, self._places = present, places
        self._generation += 1
        return Meeting(
            self._generation,
            active or None,
            tuple(places[place].rank for place in sorted(places)),
            lost,
            self._size - len(members),
            finished,
        )

    def _active(self) -> set[int]:
        return {member.rank for member in self._places.values()}

    def _assigned(self, members: list[Member]) -> dict[int, Member]:
        """Return the rank for each replica's number: its last rank, or a spare rank."""
        if not self._places:
            first = sorted(members, key=lambda member: member.rank)
            return dict(enumerate(first[: self._num_places]))
        present = {member.rank: member for member in members}
        active = self._active()
        spares = [present[rank] for rank in sorted(present) if rank not in active]
        places = {}
        for place, member in sorted(self._places.items()):
            if member.rank in present:
                places[place] = member
        # A living rank keeps its place (above), because it has that replica's state.
        for place in range(self._num_places):
            if place in places or not spares:
                continue
            gone = self._places.get(place)
            near = [s for s in spares if gone is not None and s.node == gone.node]
            places[place] = (near or spares)[0]
            spares.remove(places[place])
        return places

    def wait(self) -> bool:
        """Wait as a spare rank for a meeting; return False if none will follow.

        Returns False after `release_spares`: an active rank has failed by an error that
        is no loss. The wait sleeps, because the active ranks may need this core.
        """
        look_at = time.monotonic() + _LOOK_SECONDS
        while not self._comm.Is_revoked():
            # Let MPI progress, by a call on COMM_SELF, which cannot fail by dead ranks.
            self._mpi.COMM_SELF.Iprobe()
            now = time.monotonic()
            if now > look_at:
                look_at = now + _LOOK_SECONDS
                if self._is_released():
                    return False
                if self._misses_active():
                    return True
            time.sleep(_NAP_SECONDS)
        return True

    def _is_released(self) -> bool:
        try:
            return bool(self._comm.Iprobe(tag=_RELEASED))
        except self._mpi.Exception as error:
            if not is_loss(self._mpi, error):
                raise
            # Acknowledge the death of another spare rank, so that probes work again.
            if not self._comm.Is_revoked():
                self._comm.Ack_failed()
            return False

    def _misses_active(self) -> bool:
        ranks = sorted(self._members)
        active = self._active()
        return any(ranks[index] in active for index in lost_ranks(self._comm))

    def release_spares(self) -> None:
        """Make `wait` return False on the spare ranks, because this rank has failed."""
        if self._alone:
            return
        active = self._active()
        for index, rank in enumerate(sorted(self._members)):
            if rank not in active:
                try:
                    # Do not wait for the send, which a dead spare rank never receives.
                    self._comm.Isend(b"", dest=index, tag=_RELEASED)
                except self._mpi.Exception as error:
                    if not is_loss(self._mpi, error):
                        raise

    def knows_of_losses(self) -> bool:
        """Return whether this rank knows that a rank of the job has died."""
        if self._alone:
            return False
        return len(self._members) < self._size or bool(lost_ranks(self._comm))


def _clean_up(lost: list[Member]) -> None:
    """Remove the shared memory files of dead ranks of this node."""
    for member in lost:
        if member.node == platform.node():
            for path in glob.glob(f"/dev/shm/hpcstrat-{member.pid}-*"):
                try:
                    os.unlink(path)
                except OSError:
                    # Another rank has removed the file, or another user owns it.
                    continue
