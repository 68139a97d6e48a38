"""Threads in which the replicas of one rank take turns.

A replica runs until it makes a call between replicas, or its function ends; then the
next replica runs. When all replicas have made the call, the thread that called
`Turns.run` executes the call for all of them, because only that thread calls MPI. Two
replicas never run at the same time, and the order in which replicas run is always the
same.
"""

from __future__ import annotations

import itertools
import threading
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from hpcstrat.engine.channel.disagreement import advice_on_lengths
from hpcstrat.errors import CollectiveError, ReplicaError

__all__ = ["Turns"]

_numbers = itertools.count()

Act = Callable[[list[Any]], Sequence[Any]]
"""Function that makes a call for all replicas: arguments in, results out."""


class _Stopped(BaseException):
    """Ends a replica's thread after `Turns.close`."""


class _Seat:
    """The thread of a replica, and the state of that thread."""

    def __init__(self) -> None:
        # A lock that is held while another replica runs.
        self.turn = allocate_lock()
        self.turn.acquire()
        self.thread = 0
        # True between the start and the end of the replica's function.
        self.running = False
        self.job: Callable[[], Any] | None = None
        # Name of the call in which the replica waits, or None.
        self.what: str | None = None
        self.act: Act | None = None
        self.argument: Any = None
        self.answer: Any = None
        self.error: BaseException | None = None
        # See `Turns.meet_later`.
        self.then: Callable[[Any, BaseException | None], None] | None = None
        self.failure: BaseException | None = None


class Turns:
    """Threads for the replicas of a rank, which are reused from run to run.

    ``names`` are the names of the replicas, in replica order. If only some replicas
    make a call, ``tell`` is called with the name of the call and an error, to notify
    the other ranks, which wait in that call.
    """

    def __init__(
        self, names: Sequence[str], tell: Callable[[str, BaseException], None]
    ) -> None:
        self._names = names
        self._tell = tell
        self._seats: list[_Seat] = []
        self._ended = allocate_lock()
        self._ended.acquire()
        # Index of the replica that runs now.
        self.current = 0
        # The first error of a run, which `run` raises: it may have caused later errors.
        self._first: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function for each replica, in turns, and return the results.

        After all functions have ended, `run` raises the first error of a replica.
        """
        seats = self._seats or self._start()
        self._first = None
        for seat, function in zip(seats, functions, strict=True):
            seat.job = function
            seat.error = seat.failure = seat.answer = None
        try:
            self._go_round(seats)
            while any(seat.what is not None for seat in seats):
                self._answer(seats)
                self._go_round([seat for seat in seats if seat.job is not None])
        except BaseException:
            # After an interrupt such as Ctrl-C, end the replicas' threads.
            self.close()
            raise
        answers = [seat.answer for seat in seats]
        first, self._first = self._first, None
        for seat in seats:
            # Free results and tracebacks now, not in the next run.
            seat.answer = seat.failure = seat.error = None
        if first is not None:
            raise first
        return answers

    def meet(self, number: int, what: str, act: Act, argument: Any) -> Any:
        """Make a call together with all replicas; return the result of this replica.

        This method runs in the thread of the replica with index ``number``;
        ``argument`` is its argument of the call. Only the ``act`` of the first replica
        is called, in the thread that called `run`.
        """
        seat = self._seats[number]
        if seat.thread != get_ident():
            raise RuntimeError(
                f"expected {what} in the thread of {self._names[number]}, found it in "
                f"thread {threading.current_thread().name!r}; call it in the function "
                "that strategy.run was given"
            )
        seat.what, seat.act, seat.argument = what, act, argument
        self._pass_on(seat)
        seat.turn.acquire()
        if seat.error is not None:
            error, seat.error = seat.error, None
            raise error
        answer, seat.answer = seat.answer, None
        return answer

    def meet_later(
        self,
        what: str,
        act: Act,
        argument: Any,
        then: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Make a call for the running replica, without waiting; usable in any thread.

        The method is for a replica whose own thread is blocked, such as in a compiled
        function. ``then`` is called with the result, or an error, when the replica runs
        again.
        """
        seat = self._seats[self.current]
        seat.what, seat.act, seat.argument, seat.then = what, act, argument, then
        self._pass_on(seat)

    def _start(self) -> list[_Seat]:
        seats = self._seats = [_Seat() for _ in self._names]
        for name, seat in zip(self._names, seats, strict=True):
            threading.Thread(
                target=self._serve,
                args=(seats, seat),
                name=f"{name} ({next(_numbers)})",
                daemon=True,
            ).start()
        return seats

    def _serve(self, seats: list[_Seat], seat: _Seat) -> None:
        """Call one function for each run; this is the body of a replica's thread."""
        seat.thread = get_ident()
        while True:
            seat.turn.acquire()
            if seats is not self._seats or seat.job is None:
                return
            seat.running = True
            try:
                seat.answer = seat.job()
            except _Stopped:
                return
            except BaseException as error:
                seat.failure = error
                self._first = error if self._first is None else self._first
            seat.job, seat.running = None, False
            if seats is not self._seats:
                return
            self._pass_on(seat)

    def _go_round(self, seats: Sequence[_Seat]) -> None:
        """Let each replica run in turn until its next call or its end."""
        if seats:
            self._round = iter(seats)
            self._give_turn(next(self._round))
            self._ended.acquire()

    def _pass_on(self, seat: _Seat) -> None:
        if seat not in self._seats:
            raise _Stopped
        following = next(self._round, None)
        if following is None:
            self._ended.release()
        else:
            self._give_turn(following)

    def _give_turn(self, seat: _Seat) -> None:
        self.current = self._seats.index(seat)
        then, seat.then = seat.then, None
        if then is None:
            seat.turn.release()
            return
        answer, error = seat.answer, seat.error
        seat.answer = seat.error = None
        then(answer, error)

    def _answer(self, seats: Sequence[_Seat]) -> None:
        """Make the call in which all replicas wait, or set an error in their seats."""
        waiting = [seat for seat in seats if seat.what is not None]
        first = waiting[0]
        what, act = first.what, first.act
        same = len(waiting) == len(seats) and all(s.what == what for s in waiting)
        assert what is not None
        assert act is not None
        error: BaseException | None = None
        if not same:
            error = self._disagreement(seats)
            self._tell(what, error)
        else:
            try:
                answers = act([seat.argument for seat in seats])
                for seat, answer in zip(seats, answers, strict=True):
                    seat.answer = answer
            except Exception as problem:
                error = problem
        for seat in waiting:
            seat.what = seat.act = seat.argument = None
            seat.error = error

    def _disagreement(self, seats: Sequence[_Seat]) -> BaseException:
        """Return the error for replicas in a call that not all replicas make."""
        doing = []
        for name, seat in zip(self._names, seats, strict=True):
            if seat.failure is not None:
                what = next(seat.what for seat in seats if seat.what is not None)
                kind = type(seat.failure).__name__
                return ReplicaError(
                    f"expected all replicas in {what}, found that {name} had raised "
                    f"{kind}: {seat.failure}; see its own traceback"
                )
            doing.append(f"{name} {'at its end' if seat.what is None else seat.what}")
        return CollectiveError(
            "expected all replicas to make the same calls inside run, found "
            f"{'; '.join(doing)}; make each call on all replicas, in one order"
            + advice_on_lengths(seat.what or "" for seat in seats)
        )

    def close(self) -> None:
        """Stop the threads that wait now, and the running thread at its next call."""
        seats, self._seats = self._seats, []
        self._ended = allocate_lock()
        self._ended.acquire()
        for seat in seats:
            if seat.what is not None or not seat.running:
                seat.error = _Stopped()
                seat.what = None
                if seat.then is None:
                    seat.turn.release()
                else:
                    seat.then(
                        None, RuntimeError("expected the run to go on, found it left")
                    )
