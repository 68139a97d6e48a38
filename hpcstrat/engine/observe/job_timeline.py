"""The timeline of a job, which all ranks start and stop together."""

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
    """Topology and communicator of the active recording; None if recording is off."""

    topology: Topology | None = None
    comm: Any = None


def start(
    directory: str, settings: Settings, topology: Topology | None, comm: Any
) -> bool:
    """Start a recording, unless one is active already; return whether it was started.

    Collective over ``topology.replica_comm``; a single rank without MPI passes None for
    ``topology`` and ``comm``. ``comm`` has all replicas, and is used for nothing else
    during the recording. The files are written to ``directory``, which is created if it
    is missing; an empty string means NVTX ranges only. Raises OSError on every rank if
    a file cannot be created.
    """
    records = active.recorder is not None
    # Some ranks may already be recording for a strategy with fewer ranks.
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
    """Create this rank's file; raise OSError on all ranks if a rank cannot."""
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
            # RuntimeError: the system cannot create the writer thread.
            error = f"{type(problem).__name__}: {problem}"
    # All ranks reach this exchange, and raise the same error.
    errors = [error] if comm is None else comm.allgather(error)
    for replica, text in enumerate(errors):
        if text:
            recorder.close()
            raise OSError(
                f"expected to write a timeline in {directory}, found that replica "
                f"{replica} cannot: {text}; check the path and its permissions"
            )


def _new_run(directory: str) -> str:
    """Return a run name that no other run in the folder has."""
    os.makedirs(directory, exist_ok=True)
    # Run names sort by time, so that the newest run is the last name.
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    known, name, number = find_runs(directory), stamp, 1
    while name in known:
        number += 1
        name = f"{stamp}.{number}"
    return name


def measure(ranks: Topology | None, limit_seconds: float | None = None) -> None:
    """Measure the clocks of all workers again, if a timeline of ``ranks`` is active.

    Collective over the replicas of the timeline. Stops after ``limit_seconds``.
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
    """Stop the active timeline, if it belongs to ``topology`` (None: to any topology).

    If ``together``, the call is collective over the replicas of the timeline, and
    measures the clocks again, for at most ``limit_seconds``.
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
    """Write all recorded events to the file, because this process is about to end."""
    if active.recorder is not None:
        active.recorder.flush()


# Stop a timeline that is still active. atexit runs functions in reverse order, so this
# function runs after MPI_Finalize, which is registered later.
atexit.register(stop, together=False)
