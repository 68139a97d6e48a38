"""A file with the states of the ranks when some were late, or an error ended the job.

A job without trouble writes nothing. Each event is a line of JSON, which the rank that
saw it adds; ``hpcstrat hang`` explains them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from hpcstrat.cluster_resolver import (
    batch_job_from_environment,
    launch_from_environment,
)
from hpcstrat.engine.logs import place

__all__ = ["add_event", "keep_in", "path_of"]

# A file server that does not answer must not keep a job from its end.
_SECONDS = 2.0
# Variables by which launchers name a job, the same in all its ranks.
_STEPS = ("SLURM_STEP_ID", "SLURM_RESTART_COUNT", "PMIX_NAMESPACE", "PALS_APID")
_OTHERS = ("PMI_JOBID", "HYDRA_JOBID")


class _Kept:
    """The folder of the file, and the function that returns the ranks' states now."""

    folder = ""
    states: Callable[[], list[dict[str, Any]]] | None = None


def path_of(folder: str) -> str:
    """Return the file of this job in a folder."""
    job = batch_job_from_environment()
    names = [] if job is None else [job.job_id]
    names += [os.environ[name] for name in _STEPS if os.environ.get(name)]
    names += [] if names else [os.environ[n] for n in _OTHERS if os.environ.get(n)]
    # A job without a name is named after the process that started this host's ranks.
    names = names or [f"{platform.node()}-{os.getppid()}"]
    words = re.sub(r"[^\w.]+", "-", "-".join(names))
    return os.path.join(os.path.abspath(folder), f"hpcstrat-hang-{words}.jsonl")


def keep_in(folder: str, states: Callable[[], list[dict[str, Any]]]) -> None:
    """Write events into a folder from now on, each with what ``states`` returns.

    An empty folder turns this off.
    """
    _Kept.folder, _Kept.states = folder, states


def add_event(event: str, **content: Any) -> None:
    """Add an event of this rank; never raises, and returns within seconds."""
    if not _Kept.folder:
        return
    writer = threading.Thread(target=_add, args=(event, content), daemon=True)
    writer.start()
    writer.join(_SECONDS)


def _add(event: str, content: dict[str, Any]) -> None:
    try:
        if "ranks" not in content and _Kept.states is not None:
            content["ranks"] = _Kept.states()
        launch = launch_from_environment()
        about = {
            "event": event,
            "time": round(time.time(), 3),
            "rank": launch.rank,
            "size": launch.size,
            "place": place(),
        }
        line = json.dumps(about | content, default=str).encode() + b"\n"
        path = path_of(_Kept.folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(path, flags, 0o644)
        try:
            # One write for each line, so that lines of several ranks do not mix.
            os.write(file, line)
        finally:
            os.close(file)
        if event == "late":
            os.write(2, f"hpcstrat: kept in {path}; see hpcstrat hang\n".encode())
    except Exception:
        # An error in writing this file must not hide the job's own.
        return
