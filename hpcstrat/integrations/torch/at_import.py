"""Changes that the import of the adapter makes in torch.distributed.

The changes are in a module of their own, because the reference documentation omits this
module if torch is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import TopologyError
from hpcstrat.integrations.torch.environment import use_for_env
from hpcstrat.integrations.torch.process_group import BACKEND, HpcstratProcessGroup
from hpcstrat.strategies import MultiWorkerMirroredStrategy
from hpcstrat.strategies.connection import subset

__all__: list[str] = []


def _create(options: Any, backend_options: Any = None) -> HpcstratProcessGroup:
    """Make a process group; torch calls this function on all ranks of the group."""
    del backend_options
    world, ranks = Topology.world(), list(options.global_ranks_in_group or ())
    if ranks:
        found = ranks[options.group_rank], world.size
    else:
        found = options.group_rank, options.group_size
    if found != (world.rank, world.size):
        raise TopologyError(
            f"expected the ranks of MPI, {world.rank} of {world.size} here, found "
            f"rank {found[0]} of {found[1]}; start the program by mpirun or srun, and "
            "unset RANK and WORLD_SIZE, or use hpcstrat torch"
        )
    if getattr(options, "enable_reconfigure", False):
        # Not imported at the top, because torch before 2.14 has no such groups.
        from hpcstrat.integrations.torch.changing_groups import ChangingProcessGroup

        return ChangingProcessGroup(*found, options.group_id, options.timeout)
    comm = subset(ranks) if ranks and ranks != list(range(world.size)) else None
    seconds = None
    if options.timeout is not None and options.timeout != default_pg_timeout:
        seconds = options.timeout.total_seconds()
    limits = CommunicationOptions(timeout_seconds=seconds)
    strategy = MultiWorkerMirroredStrategy(comm=comm, communication_options=limits)
    return HpcstratProcessGroup(strategy, options.group_id, comm)


if not dist.is_available():
    raise ImportError(
        f"expected torch with torch.distributed, found {torch.__version__} without "
        "it; install a build that has it"
    )
if not hasattr(dist.Backend, BACKEND.upper()):
    dist.Backend.register_backend(
        BACKEND, _create, extended_api=True, devices=["cpu", "cuda"]
    )
# From torch 2.15 on, torch attaches a recorder in C++ to each group, which fails for
# groups that are made in Python, unless their backend is in this set.
recording: set[str] | None
recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
if recording is not None:
    recording.add(BACKEND)
use_for_env()
