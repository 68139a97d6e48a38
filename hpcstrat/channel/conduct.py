"""How data are exchanged after a header, and what becomes of a rank that cannot go on.

An error in the midst of a call leaves the other ranks there: this rank can make no
further call, tells the others so (`hpcstrat.channel.breaks`), and they raise where
they wait.
"""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Iterator
from typing import Any

from hpcstrat.channel.arrivals import Arrivals
from hpcstrat.channel.breaks import Breaks
from hpcstrat.channel.call import Call, describe_call
from hpcstrat.channel.deaths import Deaths
from hpcstrat.channel.headers import SegmentRecords
from hpcstrat.channel.patient import PatientComm
from hpcstrat.channel.places import Slots
from hpcstrat.channel.waiting import Waiter
from hpcstrat.errors import CollectiveError
from hpcstrat.observe.timeline import active
from hpcstrat.topology.topology import Topology

__all__ = ["Conduct", "EveryRankError"]

_NO_CALL = describe_call("an exchange")


class EveryRankError(Exception):
    """A ValueError in the exchange of data that every rank raises in the same place."""


class Conduct(ABC):  # noqa: B024 - the headers are made by its subclass
    """The exchanges of one topology's calls.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    topology : Topology
        At least two replicas.

    Attributes
    ----------
    broken : str
        Why no call can be made any more; empty while all is well.
    between_calls : bool
        Whether the rank was in no call when it broke, so that it can still announce its
        own end.
    num_calls : int
        Number of calls so far; the same on all ranks at the same point.
    told_at : int
        The last call in which all ranks have learned of an error.
    thread : int or None
        The thread that is in a call, see `hpcstrat.channel.entries`.
    slots : Slots
        Shared memory of the worker's ranks, for data.
    deaths : Deaths
        What it knows of ranks that have died.
    breaks : Breaks
        What ranks tell each other that cannot go on.
    arrivals : Arrivals
        How long this rank has waited for the others.
    last_call : Call or None
        The last call to which all ranks have come.
    exchanging : Call or None
        The call whose data this rank moves now.
    waiter : Waiter
        What this rank waits for.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.broken = ""
        self.closed = self.between_calls = self._meets = False
        self.num_calls = self.told_at = 0
        self.thread: int | None = None
        self.last_call: Call | None = None
        self.exchanging: Call | None = None
        self._comm = topology.duplicate()
        self._patient: dict[int, PatientComm] = {}
        self.breaks = Breaks(topology, self._comm)
        self.deaths = Deaths(topology, self._comm)
        self._rank = self._comm.rank
        self._steps = SegmentRecords(topology)
        self.slots = Slots(topology)
        self._waiter = self.waiter = Waiter(topology, self.look, self._steps)
        self.arrivals = Arrivals(topology, self._comm, lambda: self.num_calls)

    @contextlib.contextmanager
    def moving(self, call: Call) -> Iterator[PatientComm]:
        """Surround the exchange of data that follows `agree`.

        Not collective. An error in it leaves the other ranks in the call: no further
        call can be made, and the end of this rank ends the job, unless it is an
        EveryRankError, which becomes a ValueError.

        Parameters
        ----------
        call : Call
            Which call.

        Yields
        ------
        PatientComm
            Of all replicas, for exchanges by MPI.
        """
        recorder = active.recorder
        if recorder is not None:
            recorder.enter_data(call.text)
        outer, self.exchanging = self.exchanging, call
        self.topology.moves += 1
        try:
            yield self.patient(self.topology.replica_comm)
        except EveryRankError as error:
            self.told_at = self.num_calls
            raise ValueError(*error.args) from error.__cause__
        except BaseException as error:
            self.interrupted(call, error)
            raise
        finally:
            self.exchanging = outer
            if recorder is not None:
                recorder.leave_data(call.text)

    def patient(self, comm: Any) -> PatientComm:
        """Return a communicator whose calls end where another rank ends all calls.

        Not collective.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            Of some of the ranks.

        Returns
        -------
        PatientComm
            The same each time.
        """
        found = self._patient.get(comm.handle)
        if found is None:
            found = PatientComm(comm, self.topology, self._await)
            self._patient[comm.handle] = found
        return found

    def _await(self, message: Any) -> None:
        call = self.exchanging or self.last_call or _NO_CALL
        self.arrivals.wait_data(self._waiter, message, call)

    def look_for_death(self, error: BaseException, what: str) -> None:
        """Raise what an error of MPI means, where it comes of the death of a rank.

        Not collective.

        Parameters
        ----------
        error : BaseException
            Of this rank.
        what : str
            What it was doing.

        Raises
        ------
        RankLostError
            If another rank has died.
        """
        loss = self.deaths.found(error, what)
        if loss is not None:
            self.broken = "a rank has died"
            raise loss from error

    def interrupted(self, call: Call, error: BaseException) -> None:
        """End all calls: this rank has left one half-made.

        Not collective.

        Parameters
        ----------
        call : Call
            Which call.
        error : BaseException
            Why.

        Raises
        ------
        RankLostError
            If another rank has died.
        """
        self.look_for_death(error, call.text)
        self.between_calls = False
        self.break_off(f"{call.text} was interrupted", error)

    def look(self) -> None:
        """Look whether another rank has ended all calls; drives MPI's progress.

        Not collective.

        Raises
        ------
        CollectiveError
            If one has, or another thread of this one.
        """
        for_data = self.exchanging is not None
        told = self.breaks.look(self.num_calls, for_data=for_data)
        if told and not self.broken:
            self.broken = told
        if self.broken and not self._meets and self.deaths.error is None:
            raise CollectiveError(
                f"expected every rank to go on, found that {self.broken}; end the "
                "program on every rank"
            )

    def break_off(
        self, what: str, error: BaseException, entered: int | None = None
    ) -> None:
        """End all calls of this rank, and tell the others; does not wait for them.

        Not collective.

        Parameters
        ----------
        what : str
            What has happened.
        error : BaseException
            Why.
        entered : int, optional
            The rank is in no call any more, and this was ``num_calls`` where it entered
            the one that it has left.
        """
        if not self.broken:
            self.between_calls = entered is not None
            self.broken = f"{what} by {type(error).__name__} on rank {self._rank}"
            if isinstance(error, CollectiveError):
                # Such as of a rank that did not come, for which the others wait, too.
                self.broken += f" ({error})"
            if entered is None:
                self.breaks.tell(self.broken)
            else:
                self.breaks.tell(self.broken, (entered, self.num_calls))

    def met(self, call: Call) -> bool:
        """Whether all ranks have left the same call at the same point; then go on.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        call : Call
            What this rank is about to do.

        Returns
        -------
        bool
            False where they have not: nobody goes on.
        """
        broken, self._meets = self.broken, True
        try:
            met = self.arrivals.wait(self._waiter, self.breaks, call, None)
            # Where it has told once, it is not asked again.
            self.between_calls = False
            if met:
                self.breaks.forget()
                # An interrupt before a header may have taken a place.
                self.slots.restart()
                self.broken = ""
        except BaseException as error:
            # The others may have gone on, and wait for this rank in the call.
            self.between_calls, self.broken = False, broken
            self.look_for_death(error, call.text)
            self.breaks.tell(broken)
            raise
        finally:
            self._meets = False
        return met
