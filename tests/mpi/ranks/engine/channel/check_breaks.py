"""Ranks that leave calls at different times: no rank hangs, and no data are mixed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.engine.algorithms import plan
from hpcstrat.engine.channel.abort_messages import AbortMessages
from tests.mpi.ranks.outcomes import outcome

pytestmark = pytest.mark.algorithm


_LIMIT_SECONDS = 40
_SOON_SECONDS = 0.3


class _Interrupted:
    """A value that raises KeyboardInterrupt when it is converted to an array."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt


def _check_errors(errors: list[Any], *, interrupted: bool) -> None:
    """Check the errors of calls after an interrupt, whose own error is the first."""
    if interrupted:
        assert type(errors.pop(0)) is KeyboardInterrupt
    for error in errors:
        assert type(error) is hs.CollectiveError
        # The error names the interrupt, not a rank that was late.
        assert "KeyboardInterrupt" in str(error), error


def _reduced(strategy: Any, value: Any) -> Any:
    """Reduce a value; return the error or interrupt that was raised."""
    try:
        strategy.reduce("sum", value, axis=None)
    except BaseException as error:
        return error
    return None


def test_ranks_that_leave_a_call_one_after_the_other_are_answered(
    make_strategy: Any, job: Any
) -> None:
    if job.size < 3:
        pytest.skip("two ranks leave, another one stays")
    settings = hs.Settings(limit_seconds=_LIMIT_SECONDS)
    strategy = make_strategy(comm=job, settings=settings)
    last = job.rank == job.size - 1
    value = _Interrupted() if job.rank == 0 or last else np.ones(3)
    if last:
        # By now the ranks in between have answered the abort message of the first rank.
        job.Barrier()
    errors = [_reduced(strategy, value)]
    if not last:
        job.Barrier()
    errors += [_reduced(strategy, np.ones(3)) for _ in range(2)]
    _check_errors(errors, interrupted=isinstance(value, _Interrupted))
    job.Barrier()
    strategy.abandon()


def test_an_interrupt_where_ranks_meet_again_leaves_no_call_out(
    make_strategy: Any, job: Any
) -> None:
    if job.size == 1:
        pytest.skip("one rank meets nobody")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    strategy = make_strategy(comm=job)
    if job.rank == 0:
        assert type(_reduced(strategy, _Interrupted())) is KeyboardInterrupt
        before = signal.signal(signal.SIGUSR2, interrupt)
        process = os.getpid(), signal.SIGUSR2
        threading.Timer(_SOON_SECONDS, os.kill, process).start()
        # This rank waits for the other ranks, which have not left the earlier call yet.
        assert type(_reduced(strategy, np.full(3, 1.0))) is KeyboardInterrupt
        signal.signal(signal.SIGUSR2, before)
        job.Barrier()
    else:
        job.Barrier()
        assert type(_reduced(strategy, _Interrupted())) is KeyboardInterrupt
        error = _reduced(strategy, np.full(3, 1.0))
        assert type(error) is hs.CollectiveError, error
    assert type(_reduced(strategy, np.full(3, 2.0))) is hs.CollectiveError
    job.Barrier()
    strategy.abandon()


def test_an_interrupt_before_python_posts_the_header_of_the_kernel_ends_all_calls(
    make_strategy: Any, job: Any
) -> None:
    strategy = make_strategy(
        comm=job, settings=hs.Settings(limit_seconds=_LIMIT_SECONDS)
    )
    num_workers = strategy.topology.num_workers
    if num_workers < max(3, job.size) or strategy.collectives.channel.kernel is None:
        strategy.close()
        pytest.skip("Python posts the headers of three workers or more")

    def interrupt(frame: Any, *_: Any) -> None:
        if frame.f_code.co_filename == plan.__file__ and frame.f_code.co_name == "wait":
            sys.settrace(None)
            raise KeyboardInterrupt

    value, before = np.ones(3), sys.gettrace()
    assert _reduced(strategy, value) is None
    if job.rank == 0:
        sys.settrace(interrupt)
    errors = [_reduced(strategy, value)]
    sys.settrace(before)
    errors += [_reduced(strategy, value) for _ in range(2)]
    _check_errors(errors, interrupted=job.rank == 0)
    job.Barrier()
    strategy.abandon()


def test_an_interrupt_beside_the_place_for_data_mixes_nothing(
    make_strategy: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Turn the kernel off, because it takes a place and posts the header in one call.
    settings = hs.Settings(native=False)
    with make_strategy(comm=job, settings=settings) as strategy:
        if strategy.topology.num_workers > 1 or job.size == 1:
            pytest.skip("ranks that share no memory have no such places")
        for guilty in range(job.size):
            for number in range(3):
                # Only the guilty rank takes a place for its data before the interrupt.
                with monkeypatch.context() as patch:
                    if job.rank == guilty:
                        slots = strategy.collectives.channel.rings
                        take = slots.take

                        def interrupted(size: int, take: Any = take) -> int:
                            take(size)
                            raise KeyboardInterrupt

                        patch.setattr(slots, "take", interrupted)
                        value = np.ones(3)
                    else:
                        value = _Interrupted()
                    assert type(_reduced(strategy, value)) is KeyboardInterrupt
                own = np.full(3, number + job.rank)
                total = strategy.reduce("sum", own, axis=None)
                right = sum(number + rank for rank in range(job.size))
                np.testing.assert_array_equal(total, np.full(3, right))


def test_ranks_that_leave_the_same_call_again_and_again_go_on(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy(comm=job) as strategy:
        for number in range(20):
            assert type(_reduced(strategy, _Interrupted())) is KeyboardInterrupt
            if number % 3 == 0:
                continue
            total = strategy.reduce("sum", np.full(3, number), axis=None)
            np.testing.assert_array_equal(total, np.full(3, number * job.size))
        assert outcome(strategy.barrier) is None


class _ProbedTwice:
    """A communicator on which each probe is interrupted by one of the same kind."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.interrupt = comm, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def _probe(self, name: str, **named: Any) -> Any:
        found = getattr(self._comm, name)(**named)
        if found and self.interrupt:
            self.interrupt.pop()()
        return found

    def Iprobe(self, **named: Any) -> Any:  # noqa: N802
        return self._probe("Iprobe", **named)

    def Improbe(self, **named: Any) -> Any:  # noqa: N802
        return self._probe("Improbe", **named)

    def Recv(self, *given: Any, tag: int, status: Any) -> None:  # noqa: N802
        assert self._comm.Iprobe(tag=tag), "the receive would wait forever"
        self._comm.Recv(*given, tag=tag, status=status)


def test_an_abort_message_is_received_once_if_two_threads_look(job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank gets no message")
    comm = _ProbedTwice(job.Dup())
    aborts = AbortMessages(SimpleNamespace(mpi=MPI), comm)  # type: ignore[arg-type]
    comm.interrupt.append(aborts.look)
    if job.rank == 0:
        aborts.tell("one rank has left")
    else:
        while not (found := aborts.look()):
            time.sleep(0.001)
        assert found == "one rank has left"
        assert not comm.interrupt
    job.Barrier()
    # Receive the messages by which other ranks have passed the first one on.
    while len(aborts._came) < job.size - 1:
        aborts.look()
    job.Barrier()
    comm.Free()


def test_late_ranks_are_named_by_their_numbers_in_the_job(job: Any) -> None:
    if job.size < 3:
        pytest.skip("a strategy of several ranks leaves out the first one")
    part = job.Split(int(job.rank == 0), job.rank)
    if job.rank > 0:
        settings = hs.Settings(limit_seconds=1.0, watchdog=False)
        strategy = hs.MultiWorkerMirroredStrategy(comm=part, settings=settings)
        if job.rank == 1:
            error = outcome(strategy.barrier)
            late = list(range(2, job.size))
            assert type(error) is hs.CollectiveError, error
            assert f"found that ranks {late} did not come" in str(error)
            assert error.ranks == tuple(late)
        part.Barrier()
        strategy.abandon()
    job.Barrier()
    part.Free()
