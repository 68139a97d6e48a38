"""The end of a rank's process, without a deadlock of the other ranks.

An uncaught exception ends the job (`hpcstrat.safety.uncaught`). A rank that ends
normally or by ``sys.exit`` announces its end on every open channel before
``MPI_Finalize``, and waits until the other ranks announce their ends, too. If another
rank makes a collective call meanwhile, that rank raises a CollectiveError that names
the ranks that have ended.

Before the announcement, the rank waits for its GPU, because kernels on the other GPUs
may wait for kernels of this rank. When all ranks have announced their ends, they free
the communicators of NCCL together. If the ranks did not, Python would destroy these
communicators at its end, at a different time on each rank, and the first rank would
deadlock (github.com/vllm-project/vllm/pull/39846).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from typing import Any

from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.logs import get_logger, rank_on_host
from hpcstrat.engine.observe import job_timeline
from hpcstrat.engine.topology.topology import start_mpi
from hpcstrat.safety import lateness, uncaught
from hpcstrat.safety.presence import LEFT, own_registry
from hpcstrat.safety.uncaught import abort, running_mpi
from hpcstrat.safety.watchdog import watchdog

__all__ = ["install", "register", "unregister"]

_LONGEST_NAP_SECONDS = 0.01
# Delay of this rank's message, so that other ranks print their errors first.
_SECONDARY_SECONDS = 0.5
_CLOCKS_SECONDS = 5.0

_channels: list[Channel] = []


class _Leaving:
    """The process in which `_leave` is installed, and whether `_leave` has run."""

    process = 0
    left = False


def register(channel: Channel) -> None:
    """Let `_leave` announce this process's end on a channel, until `unregister`."""
    _channels.append(channel)
    install()


def install() -> None:
    """Handle normal ends and uncaught exceptions of this process from now on."""
    uncaught.install()
    if not _Leaving.process:
        _Leaving.process = os.getpid()
        uncaught.at_abort(job_timeline.flush)
        # Python runs exit functions in reverse order, so that ``_leave`` runs before
        # mpi4py's own function, which was registered earlier.
        atexit.register(_leave)
        # A program may call MPI.Finalize itself. MPI.Finalize first deletes the
        # attributes of COMM_SELF, which runs ``_leave`` (MPI-4.1 11.2.4).
        mpi = start_mpi()
        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_leave), 0)


def unregister(channel: Channel) -> None:
    """Forget a channel, because all ranks are closing it."""
    if channel in _channels:
        _channels.remove(channel)


def _leave(*_: Any) -> None:
    """Announce the end of this rank, and wait until all other ranks end."""
    mpi = running_mpi()
    if mpi is None or _Leaving.left or os.getpid() != _Leaving.process:
        return
    _Leaving.left = True
    board = own_registry()
    if board is not None:
        # Ranks that are creating a strategy have no channel with this rank: they can
        # learn of its end only from its page in shared memory.
        board.show(stage=LEFT)
    waiting = []
    for channel in _channels:
        if channel.failures.broken and not channel.failures.aborts.may_resume:
            _give_up(channel)
        elif not channel.closed:
            _finish_on_gpu(channel)
            channel.post_leave()
            waiting.append(channel)
    nap, look_at = 0.0, time.monotonic() + 1
    while waiting := _still_waiting(waiting):
        now = time.monotonic()
        if now > look_at:
            look_at = now + 1
            _check_alive(waiting)
        time.sleep(nap)
        nap = min(nap + 1e-4, _LONGEST_NAP_SECONDS)
    _sum_up()
    watchdog.stop()


def _finish_on_gpu(channel: Channel) -> None:
    """Wait until the GPU has finished all collective calls of a channel."""
    with contextlib.suppress(Exception):
        channel.pending.drain()
    if channel.device_group is None:
        return
    look_at = time.monotonic() + 1
    try:
        ended = channel.device_group.lane.done()
        while not ended.agreed():
            if time.monotonic() > look_at:
                look_at = time.monotonic() + 1
                _end_with(channel, channel.steps.dead())
            time.sleep(_LONGEST_NAP_SECONDS)
    except Exception as error:
        _end_job(f"its GPU has failed: {error}")


def _sum_up() -> None:
    """After all ranks left: report late ranks, free NCCL, and end the timeline."""
    left = [c for c in _channels if not c.failures.broken and not c.closed]
    for channel in left:
        lateness.conclude(channel.arrivals)
    for channel in _channels:
        if channel in left and channel.device_group is not None:
            channel.device_group.close()
        elif channel.device_group is not None and not channel.closed:
            channel.device_group.abandon()
    together = len(left) == len(_channels)
    job_timeline.stop(together=together, limit_seconds=_CLOCKS_SECONDS)


def _still_waiting(channels: list[Channel]) -> list[Channel]:
    """Return the channels on which ranks have not ended; warn if they make a call."""
    missing = []
    for channel in channels:
        try:
            outcome = channel.poll_leave()
        except Exception as error:
            # If a rank has died and the launcher does not end the job, MPI raises here.
            _end_job(str(error))
            raise
        if outcome is None:
            missing.append(channel)
        elif outcome:
            # Let the ranks in the call print this error first; they end the job.
            time.sleep(_SECONDARY_SECONDS)
            get_logger().warning("%s: %s", rank_on_host(), outcome)
    return missing


def _give_up(channel: Channel) -> None:
    """End the job after a failed call, unless it failed because ranks had ended."""
    broken = channel.failures.broken
    if "left the program" not in broken:
        _end_job(f"its strategy is broken, because {broken}")


def _check_alive(waiting: list[Channel]) -> None:
    for channel in waiting:
        dead = channel.steps.dead()
        # Ignore dead ranks that have announced their end.
        if set(dead).intersection(channel.headers.missing()):
            _end_with(channel, dead)


def _end_with(channel: Channel, dead: list[int]) -> None:
    """End the job if ranks for which this rank waits are dead."""
    if dead:
        names = [channel.topology.job_ranks[rank] for rank in dead]
        _end_job(
            f"the processes of ranks {names} have died; look for their last output"
        )


def _end_job(reason: str) -> None:
    abort(f"hpcstrat: {rank_on_host()} ends the job: {reason}", 1)
