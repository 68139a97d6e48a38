"""`TerminationConfig`: options for notices of a job's end, and for the reaction."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcstrat.cluster_resolver import batch_job_from_environment

__all__ = ["TerminationConfig"]

# Signals that no process can catch.
_NOT_CAUGHT = {signal.SIGKILL, signal.SIGSTOP}


@dataclass(frozen=True)
class TerminationConfig:
    """Options of a `PreemptionCheckpointHandler`: its notices, and its reaction.

    Not collective.

    Parameters
    ----------
    termination_watcher_fn : callable, optional
        Function that a thread of each rank calls about once a second, without
        arguments, instead of listening for signals. A true result on any rank is a
        notice. The function must not call hpcstrat.
    exit_fn : callable, optional
        Function that is called without arguments on every rank, after everything is
        saved; default: ``sys.exit(42)``. If it returns, the training continues.
    grace_period : float, optional
        Seconds from a notice until the system ends the job. If above 0, the handler
        saves after the current step, and the training continues; shortly before the end
        the handler saves again, and exits. Default: 0, save once and exit.
    save_fn : callable, optional
        Function that is called on every rank instead of the manager's ``save``.
    signals : sequence of signal.Signals or str, optional
        Signals that are a notice if at least one rank receives one of them. Default:
        SIGTERM and SIGUSR1; in jobs of LSF and SGE also SIGUSR2, their warning signal.
    job_end : float or "scheduler" or None
        End of the job, in seconds since the epoch; ``"scheduler"`` asks Slurm, PBS,
        Flux, LSF or SGE for the end of this job. The handler saves and exits early
        enough for a save that takes three times as long as the longest save so far.
        ``"slurm"`` is an older name of ``"scheduler"``.
    requeue : bool
        Whether the first rank asks Slurm, LSF or SGE to requeue the job, before it
        exits. Users of PBS and Flux cannot do so: see ``jobs/pbs/``, ``jobs/flux/``.

    Raises
    ------
    ValueError
        If a number is negative or not finite, a function cannot be called, or a signal
        cannot be caught.
    """

    termination_watcher_fn: Callable[[], object] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None
    signals: Sequence[Any] | None = field(default=None, kw_only=True)
    job_end: Any = field(default="scheduler", kw_only=True)
    requeue: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(
                    f"expected a function as {name}, found {value!r}; leave it out"
                )
        grace = self.grace_period
        if grace is not None and not _is_time(grace):
            raise ValueError(
                f"expected a grace_period of 0 or more seconds, found {grace!r}; leave "
                "it out to save and leave at once"
            )
        if self.job_end not in (None, "scheduler", "slurm") and not _is_time(
            self.job_end
        ):
            raise ValueError(
                "expected a job_end in seconds since the epoch, 'scheduler' or None, "
                f"found {self.job_end!r}; take one"
            )
        found = _usual_signals() if self.signals is None else self.signals
        if isinstance(found, (str, int)):
            found = [found]
        object.__setattr__(self, "signals", tuple(map(_signal, found)))


def _usual_signals() -> list[signal.Signals]:
    job = batch_job_from_environment()
    warned = job is not None and job.scheduler in ("LSF", "SGE")
    return [signal.SIGTERM, signal.SIGUSR1, *([signal.SIGUSR2] if warned else [])]


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _signal(found: Any) -> signal.Signals:
    try:
        number = (
            signal.Signals[found] if isinstance(found, str) else signal.Signals(found)
        )
    except (KeyError, ValueError, TypeError):
        number = None
    if number is None or number in _NOT_CAUGHT:
        raise ValueError(
            "expected signals that can be caught, such as 'SIGTERM' or 'SIGUSR1', "
            f"found {found!r}; name another"
        )
    return number
