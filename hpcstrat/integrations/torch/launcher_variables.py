"""Variables of launchers, which ``hpcstrat torch`` sets for a program, or hides."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from hpcstrat._launchers import (
    LAUNCHERS,
    SCHEDULERS,
    is_of_launcher,
    keep_environment,
)
from hpcstrat.integrations.torch.replacements import tell
from hpcstrat.strategies import MultiWorkerMirroredStrategy

__all__ = ["change_variables"]

_JOB_ID = "1"


def change_variables(
    hidden: Sequence[str], chosen: Sequence[str], *, explains: bool = False
) -> None:
    """Remove launchers' variables from the environment, then set those of others.

    Collective over all ranks of the job, after `init_env`. ``hidden`` has ``mpi`` or
    ``slurm``, and ``chosen`` has ``openmpi``, ``slurm`` or ``torchrun``. hpcstrat
    itself reads the environment as it was before. With ``explains``, rank 0 prints the
    names of the removed variables, and its values of the new ones.
    """
    if not hidden and not chosen:
        return
    keep_environment()
    for name in hidden:
        gone = sorted(filter(_TESTS[name], os.environ))
        for variable in gone:
            del os.environ[variable]
        shown = ", ".join(gone) if explains else f"{len(gone)} variables"
        tell(f"hid the variables of {name} from the program: {shown}")
    hosts = _hosts() if "slurm" in chosen else []
    for name in chosen:
        values = _slurm(hosts) if name == "slurm" else _RENAMED[name]()
        os.environ.update(values)
        pairs = [f"{variable}={value}" for variable, value in values.items()]
        shown = ", ".join(pairs) if explains else f"{len(pairs)} variables"
        tell(f"set the variables of {name}: {shown}")


def _is_of_slurm(variable: str) -> bool:
    return variable.startswith(SCHEDULERS["Slurm"].prefixes)


_TESTS = {"mpi": is_of_launcher, "slurm": _is_of_slurm}


def _hosts() -> list[tuple[str, int]]:
    """Return each worker's host and number of ranks; collective over all ranks."""
    strategy = MultiWorkerMirroredStrategy()
    own = int(os.environ["GROUP_RANK"]), platform.node()
    found = strategy.collectives.all_gather_object(own, "hosts of the job")
    strategy.close()
    counts: dict[tuple[int, str], int] = {}
    for place in sorted(found):
        counts[place] = counts.get(place, 0) + 1
    return [(host, count) for (_, host), count in counts.items()]


def _numbers(name: str) -> dict[str, str]:
    """Return the variables of a launcher with this rank, and the numbers of ranks."""
    (launcher,) = (one for one in LAUNCHERS if one.name == name)
    return {
        launcher.rank: os.environ["RANK"],
        launcher.size: os.environ["WORLD_SIZE"],
        launcher.local_rank[0]: os.environ["LOCAL_RANK"],
        launcher.local_size[0]: os.environ["LOCAL_WORLD_SIZE"],
    }


def _openmpi() -> dict[str, str]:
    """Return the variables of Open MPI's mpirun (its FAQ, "Running MPI jobs")."""
    env = os.environ
    return {
        **_numbers("mpirun of Open MPI"),
        "OMPI_COMM_WORLD_NODE_RANK": env["LOCAL_RANK"],
        "OMPI_UNIVERSE_SIZE": env["WORLD_SIZE"],
    }


def _torchrun() -> dict[str, str]:
    """Return the variables by which programs recognize torchrun; `init_env` sets more.

    See the page "torchrun" of PyTorch, "Environment Variables".
    """
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "ROLE_NAME": "default",
    }


_RENAMED = {"openmpi": _openmpi, "torchrun": _torchrun}


def _slurm(hosts: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Return the variables of srun (srun's manual page, "OUTPUT ENVIRONMENT")."""
    env = os.environ
    names = ",".join(host for host, _ in hosts)
    counts = ",".join(str(count) for _, count in hosts)
    job = env.get("SLURM_JOB_ID", _JOB_ID)
    return {
        **_numbers("srun"),
        "SLURM_NODEID": env["GROUP_RANK"],
        "SLURM_NTASKS": env["WORLD_SIZE"],
        "SLURM_NPROCS": env["WORLD_SIZE"],
        "SLURM_NTASKS_PER_NODE": env["LOCAL_WORLD_SIZE"],
        "SLURM_TASKS_PER_NODE": counts,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_NNODES": env["GROUP_WORLD_SIZE"],
        "SLURM_JOB_NUM_NODES": env["GROUP_WORLD_SIZE"],
        "SLURM_STEP_NUM_NODES": env["GROUP_WORLD_SIZE"],
        "SLURM_JOB_NODELIST": names,
        "SLURM_NODELIST": names,
        "SLURM_STEP_NODELIST": names,
        "SLURMD_NODENAME": platform.node(),
        "SLURM_LAUNCH_NODE_IPADDR": env["MASTER_ADDR"],
        "SLURM_SRUN_COMM_HOST": env["MASTER_ADDR"],
        "SLURM_JOB_ID": job,
        "SLURM_JOBID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
    }
