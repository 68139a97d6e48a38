"""The watchdog's thread: reports late ranks, and ends a job that makes no progress.

Each process has one watchdog's thread, which wakes about once a second. The thread
makes no calls of MPI; it only reads state that collective calls record. When a rank has
waited longer than ``warn_seconds``, the lowest waiting rank finds the late ranks
(`inquiry`) and reports them. After ``limit_seconds``, the wait in the main thread
raises an error. If the main thread cannot raise an error, because MPI blocks it, the
watchdog's thread ends the process. The thread also ends a process that waits inside of
CUDA for kernels that do not end (`gpu_watch`).
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.waiting import Waiting
from hpcstrat.engine.logs import get_logger, rank_on_host
from hpcstrat.engine.settings import Settings
from hpcstrat.safety import hang_file
from hpcstrat.safety.uncaught import print_last_lines
from hpcstrat.safety.watchdog.gpu_watch import GpuWatch
from hpcstrat.safety.watchdog.inquiry import Inquiry
from hpcstrat.safety.watchdog.late_ranks import some_ranks
from hpcstrat.safety.watchdog.pages import BUSY, STALE_SECONDS, Status, grouped
from hpcstrat.safety.watchdog.watch import Watch
from hpcstrat.safety.watchdog.watchdog_messages import WatchdogMessages

__all__ = ["end_process", "expect_slow", "register", "stop", "unregister"]

_REPEAT = 10
# Inquiries of different workers, and of ranks of a worker, are delayed by different
# times, so that most ranks find that another rank already makes an inquiry.
_STAGGER_SECONDS = 0.05
_LONGEST_STAGGER_SECONDS = 2.0
_OVERDUE_SECONDS = 15.0
# Time after the limit in which the main thread can raise an error.
_GRACE_SECONDS = 20.0
_CLOSE_SECONDS = 5.0
_FLUSH_SECONDS = 1.0
_MOST_FAILURES = 3
EXIT_CODE = 75
"""Exit status of a process that the watchdog ends; EX_TEMPFAIL of sysexits.h."""


class _Watchdog:
    """The watchdog of this process: its thread, and the channels that it watches."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.watched: list[WatchdogMessages] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = False
        self._gpu = GpuWatch()
        self._thread = threading.Thread(
            target=self._loop, name="hpcstrat-watchdog", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """End the watchdog's thread; call this from another thread."""
        self._ended = True
        self.wake()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake)

    def wake(self) -> None:
        """Wake the watchdog's thread now."""
        os.eventfd_write(self._wake, 1)

    def _loop(self) -> None:
        while not self._ended:
            ticks = [one.watch.tick_seconds for one in self.watched]
            self._serve(min(ticks, default=1.0))
            for one in list(self.watched):
                self._guarded(one, self._turn)
            reason = self._gpu.reason_to_end([one.watch for one in self.watched])
            if reason:
                end_process(reason)

    def _guarded(
        self, one: WatchdogMessages, act: Callable[[WatchdogMessages], None]
    ) -> None:
        """Call ``act`` for one channel; log its errors instead of raising them."""
        watch = one.watch
        if not watch.turn_lock.acquire(blocking=False):
            return
        try:
            act(one)
        except Exception:
            if watch.closed or self._ended:
                return
            one.failures += 1
            if one.failures == 1:
                get_logger().warning("the watchdog has failed", exc_info=True)
            if one.failures == _MOST_FAILURES and one in self.watched:
                get_logger().warning("the watchdog has failed again, and is off")
                self.watched.remove(one)
                watch.channel.waiter.watched = False
        finally:
            watch.turn_lock.release()

    def _serve(self, seconds: float) -> None:
        """Wait for some seconds, or until messages arrive, and answer the messages."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        handles = {}
        for one in list(self.watched):
            mail = one.watch.mail
            handle = -1 if mail is None or one.watch.closed else mail.socket.fileno()
            if handle >= 0:
                handles[handle] = one
                poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(max(1, int(1000 * seconds))):
            if handle == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._receive(handles[handle])
        for one in list(self.watched):
            one.watch.keep_alive()

    def _receive(self, one: WatchdogMessages) -> None:
        try:
            one.receive()
        except Exception:
            # Ignore the error if the main thread has closed the channel meanwhile.
            if not one.watch.closed:
                raise

    def _turn(self, one: WatchdogMessages) -> None:
        watch = one.watch
        waiting = watch.waiting()
        if waiting is None:
            return
        watch.adopt(waiting)
        now = time.monotonic()
        if now >= one.held_until and self._is_due(watch, waiting, now):
            self._inquire(one, waiting)
        if _is_over(watch, waiting, time.monotonic()):
            end_process(_endless(watch, waiting))

    def _is_due(self, watch: Watch, waiting: Waiting, now: float) -> bool:
        """Return whether this rank has to make an inquiry now."""
        warn, looked = watch.warn_seconds, waiting.looked_at
        milestones = [waiting.begin + warn, waiting.last_look, looked + _REPEAT * warn]
        if waiting.patient_until > now:
            # A rank that announced to be slow may have finished its slow part by now.
            milestones.append(looked + warn)
        passed = [at for at in milestones if looked < at <= now]
        if not passed or watch.others_inquire():
            return False
        stagger = watch.topology.worker_id * _STAGGER_SECONDS
        due = min(passed) + min(stagger, _LONGEST_STAGGER_SECONDS)
        if now < due:
            return False
        first = next(
            (
                index
                for index, status in enumerate(watch.statuses())
                if status is not None and _waits_long(status, watch, now)
            ),
            0,
        )
        index = watch.topology.worker_comm.rank
        return first >= index or now > due + _OVERDUE_SECONDS + index * _STAGGER_SECONDS

    def _inquire(self, one: WatchdogMessages, waiting: Waiting) -> None:
        watch = one.watch
        inquiry = Inquiry(one, waiting, self._serve)
        if not inquiry.run():
            return
        now, warn = time.monotonic(), watch.warn_seconds
        reported_at = watch.reported_at()
        if now < min(waiting.begin + warn, waiting.last_look):
            return
        if reported_at > waiting.start and now < reported_at + (_REPEAT - 0.5) * warn:
            return
        # During the report, which takes bounded time, the wait has no time limit.
        waiting.held_until = math.inf
        report = inquiry.report()
        if report is not None:
            get_logger().warning("%s", report)
            groups = grouped(inquiry.states)
            hang_file.add_event("late", report=asdict(report), ranks=groups)
        waiting.held_until = time.monotonic()


def _waits_long(status: Status, watch: Watch, now: float) -> bool:
    """Return whether a rank with this status has waited long enough to inquire."""
    shortest = min(watch.warn_seconds, watch.limit_seconds / 2)
    return (
        status.state != BUSY
        and now - status.beat < STALE_SECONDS
        and now - max(status.since, status.slow_until) >= shortest
    )


def _is_over(watch: Watch, waiting: Waiting, now: float) -> bool:
    """Return whether the time limit has passed without an error in the main thread."""
    end = waiting.begin + watch.limit_seconds
    if waiting.timeout_seconds is not None:
        end = max(end, waiting.start + waiting.timeout_seconds)
    blocked = watch.channel.waiter.waiting is None
    return watch.waiting() is waiting and now > end + (0 if blocked else _GRACE_SECONDS)


def _endless(watch: Watch, waiting: Waiting) -> str:
    """Return the reason for the end of a process that waits too long, as text."""
    seconds = time.monotonic() - waiting.start
    names = [watch.topology.job_ranks[rank] for rank in waiting.late]
    late = some_ranks(names) if names else "other ranks"
    return (
        f"it has waited {seconds:.0f} s in {waiting.call.text} (call "
        f"{watch.channel.num_calls}) for {late}, and cannot raise an error, because a "
        "call of MPI, or other C code, does not return"
    )


def end_process(reason: str) -> None:
    """End this process, and so the job, because its main thread is blocked.

    Call this from a thread other than the main thread.
    """
    os.write(2, f"hpcstrat: {rank_on_host()} ends the job: {reason}\n".encode())
    hang_file.add_event("end", reason=reason)
    print_last_lines()
    # Flush in another thread, because the main thread may hold a lock of sys.stdout.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_SECONDS)
    os._exit(EXIT_CODE)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


class _State:
    """Holder of this process's watchdog, if it runs."""

    watchdog: _Watchdog | None = None


# Deadlines of all active `expect_slow` blocks of this process, in any thread.
_deadlines: list[float] = []


def _running() -> _Watchdog | None:
    """Return this process's watchdog; None if there is none, or in a forked child."""
    watchdog = _State.watchdog
    if watchdog is None or watchdog.process != os.getpid():
        return None
    return watchdog


def register(channel: Channel, settings: Settings) -> None:
    """Watch over a channel from now on, until `unregister`.

    Collective over the channel's ranks.
    """
    assert settings.limit_seconds is not None
    hang_file.keep_in(settings.hang_folder or "", known_states)
    channel.waiter.limit_seconds = settings.limit_seconds
    if not settings.watchdog:
        return
    watch = Watch(channel, settings)
    try:
        watchdog = _running() or _Watchdog()
    except (OSError, RuntimeError) as error:
        get_logger().warning("the watchdog cannot run: %s", error)
        watch.close()
        return
    _State.watchdog = watchdog
    channel.waiter.slow_until = max(_deadlines, default=-math.inf)
    watchdog.watched.append(WatchdogMessages(watch))
    channel.waiter.watched = True
    watchdog.wake()


def known_states() -> list[dict[str, Any]]:
    """Return the states of this worker's ranks from shared memory."""
    watchdog = _running()
    for one in [] if watchdog is None else list(watchdog.watched):
        return grouped(one.watch.states())
    return []


def unregister(channel: Channel) -> None:
    """Stop watching a channel; after the last channel, end the watchdog's thread."""
    watchdog = _running()
    for one in [] if watchdog is None else list(watchdog.watched):
        if one.watch.channel is channel and watchdog is not None:
            channel.waiter.watched = False
            watchdog.watched.remove(one)
            # Set ``closed`` before acquiring the lock, so that a running inquiry ends.
            one.watch.closed = True
            watchdog.wake()
            is_free = one.watch.turn_lock.acquire(timeout=_CLOSE_SECONDS)
            one.watch.close()
            if is_free:
                one.watch.turn_lock.release()
    if watchdog is not None and not watchdog.watched:
        stop()


def stop() -> None:
    """End the watchdog's thread, before MPI ends."""
    watchdog = _running()
    if watchdog is not None:
        for one in watchdog.watched:
            one.watch.channel.waiter.watched = False
        _State.watchdog = None
        watchdog.end()


def _tell_slow(slow_until: float) -> None:
    watchdog: Any = _running()
    for one in [] if watchdog is None else list(watchdog.watched):
        one.watch.channel.waiter.slow_until = slow_until
        one.watch.publish()
        one.tell_slow(slow_until)


@contextmanager
def expect_slow(seconds: float) -> Iterator[None]:
    """Let other ranks wait longer for this rank; see ``Strategy.expect_slow``."""
    deadline = time.monotonic() + seconds
    _deadlines.append(deadline)
    _tell_slow(max(_deadlines, default=deadline))
    try:
        yield
    finally:
        _deadlines.remove(deadline)
        # Other ranks count their waits from this time: now, or an earlier deadline.
        _tell_slow(max(_deadlines, default=min(deadline, time.monotonic())))
