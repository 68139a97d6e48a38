"""The timeline of a job: all ranks begin it, and end it, together."""

from __future__ import annotations

import atexit
import os
import platform
import time
from typing import Any

from hpcstrat.engine.arrays.kinds import nvtx_ranges
from hpcstrat.engine.observe.clocks import measure_clock
from hpcstrat.engine.observe.timeline import Recorder, active
from hpcstrat.engine.observe.timeline.alignment import Sample
from hpcstrat.engine.observe.timeline.events import Track
from hpcstrat.engine.observe.timeline.rank_files import file_name, find_runs
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.topology import Topology

__all__ = ["flush", "measure", "start", "stop"]


class _Session:
    """The recording that is on; None while there is none."""

    topology: Topology | None = None
    comm: Any = None


def start(
    directory: str, settings: Settings, topology: Topology | None, comm: Any
) -> bool:
    """Begin to record, unless this process records already; return whether it did.

    Collective over ``topology.replica_comm``; a single rank without MPI passes neither
    topology nor ``comm``, which has all replicas and serves nothing else meanwhile. The
    files go to the directory, which is made where it is missing; an empty one stands
    for NVTX ranges alone. OSError on every rank, if a file cannot be made.
    """
    records = active.recorder is not None
    # Some ranks may record already, for a strategy of fewer ranks.
    if records if comm is None else any(comm.allgather(records)):
        return False
    nvtx = nvtx_ranges() if settings.nvtx else None
    track = Track(host=platform.node())
    if topology is not None:
        replica = topology.replica_id, topology.num_replicas
        track = Track(topology.worker_id, *replica, platform.node())
    recorder = Recorder(track, nvtx)
    if directory:
        most_bytes = (settings.timeline_megabytes or 0) << 20
        _open(recorder, directory, most_bytes, topology, comm)
    elif nvtx is None:
        return False
    _Session.topology, _Session.comm = topology, comm
    active.recorder = recorder
    return True


def _open(
    recorder: Recorder,
    directory: str,
    most_bytes: int,
    topology: Topology | None,
    comm: Any,
) -> None:
    """Make the files of all ranks, or raise on all."""
    run: Any = None
    error = ""
    if recorder.track.replica == 0:
        try:
            run = _new_run(directory), time.perf_counter_ns()
        except OSError as problem:
            error = f"{type(problem).__name__}: {problem}"
    if comm is not None:
        run = comm.bcast(run)
    if run is not None:
        name, zero_ns = run
        sample = Sample(zero_ns, 0, 0)
        if topology is not None and comm is not None:
            sample = topology.worker_comm.bcast(measure_clock(topology, comm))
        try:
            os.makedirs(directory, exist_ok=True)
            path = os.path.join(directory, file_name(name, recorder.track.replica))
            if sample is None:
                raise TimeoutError("replica 0 did not tell the time")
            recorder.open(path, zero_ns, sample, most_bytes)
        except (OSError, RuntimeError) as problem:
            # RuntimeError: the system gives no thread for the writer.
            error = f"{type(problem).__name__}: {problem}"
    # All ranks come here, and raise the same.
    errors = [error] if comm is None else comm.allgather(error)
    for replica, text in enumerate(errors):
        if text:
            recorder.close()
            raise OSError(
                f"expected to write a timeline in {directory}, found that replica "
                f"{replica} cannot: {text}; check the path and its permissions"
            )


def _new_run(directory: str) -> str:
    """Return a name that no other run in the folder has."""
    os.makedirs(directory, exist_ok=True)
    # Names of runs sort by time, which is how the newest is found.
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    known, name, number = find_runs(directory), stamp, 1
    while name in known:
        number += 1
        name = f"{stamp}.{number}"
    return name


def measure(ranks: Topology | None, limit_seconds: float | None = None) -> None:
    """Measure the clocks of all workers again, if a timeline of ``ranks`` is recorded.

    Collective over the replicas of the timeline; given up after the limit.
    """
    recorder, topology = active.recorder, _Session.topology
    if recorder is None or recorder.file is None or topology is None:
        return
    if topology is not ranks:
        return
    if _Session.comm is not None and not topology.closed:
        sample = measure_clock(topology, _Session.comm, limit_seconds)
        if sample is not None:
            recorder.add_clock(sample)


def stop(
    topology: Topology | None = None,
    *,
    together: bool = True,
    limit_seconds: float | None = None,
) -> None:
    """End the timeline, if there is one; only if it is that of ``topology``, if given.

    With ``together``, collective over the replicas of the timeline, at the same point
    of the program: the clocks are measured again, within the limit.
    """
    recorder = active.recorder
    if recorder is None or (topology is not None and _Session.topology is not topology):
        return
    if together:
        measure(_Session.topology, limit_seconds)
    active.recorder = None
    _Session.topology = _Session.comm = None
    recorder.close()


def flush() -> None:
    """Write all recorded events: this process is about to end."""
    if active.recorder is not None:
        active.recorder.flush()


# Ends a timeline that is still on; registered before the end of MPI, so run after it.
atexit.register(stop, together=False)
