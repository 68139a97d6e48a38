"""The end of a scheduler's job by its last watcher."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping

from hpcstrat._launchers import SCHEDULERS
from hpcstrat.cluster_resolver.batch_job import batch_job_from_environment, output_of

__all__ = ["end_allocation", "job_name"]


def job_name(env: Mapping[str, str] | None = None) -> str:
    """Return a name that differs for each start of watchers; empty without a job."""
    env = os.environ if env is None else env
    job = batch_job_from_environment(env)
    if job is None:
        return ""
    restarts = env.get(SCHEDULERS[job.scheduler].restarts, "") or "0"
    return f"{job.scheduler} {job.job_id}.{restarts}.{env.get('SLURM_STEP_ID', '0')}"


def end_allocation(
    *, queue_again: bool, is_batch_host_lost: bool, log: Callable[[str], None]
) -> None:
    """Queue the job again, or end it if nobody else does."""
    job = batch_job_from_environment(os.environ)
    if job is None:
        return
    if queue_again:
        try:
            job.requeue()
            log(f"job {job.job_id} is queued again")
            return
        except RuntimeError as error:
            log(str(error))
    # The job script has ended with its node. Slurm would keep the job until its limit.
    if is_batch_host_lost and job.scheduler == "Slurm":
        log(f"ends job {job.job_id}, whose script was on a lost node")
        try:
            output_of(["scancel", job.job_id])
        except (OSError, subprocess.SubprocessError) as error:
            log(f"expected scancel to end job {job.job_id}, found {error}; end it")
