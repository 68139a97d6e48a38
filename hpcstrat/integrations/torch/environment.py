"""Sets the environment variables that torchrun would set, from the ranks of MPI."""

from __future__ import annotations

import importlib
import os
from typing import Any
from urllib.parse import urlparse

from hpcstrat.integrations.frameworks import meeting_place
from hpcstrat.strategies import MultiWorkerMirroredStrategy

__all__ = ["VARIABLES", "init_env", "use_for_env"]

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""The variables that `init_env` sets."""

# For each value of MASTER_PORT that `init_env` has set: whether a process group has
# used this port.
_given: dict[str, bool] = {}


def init_env() -> None:
    """Set the environment variables that ``torchrun`` would set, from the ranks of MPI.

    Collective over all ranks of the job.

    The variables are ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``GROUP_RANK``, ``GROUP_WORLD_SIZE``, ``ROLE_RANK``, ``ROLE_WORLD_SIZE``,
    ``MASTER_ADDR`` (the address at which rank 0 listens) and ``MASTER_PORT`` (a free
    port). Variables that are already set keep their values. ``dist.init_process_group``
    calls this function if `hpcstrat.integrations.torch` is imported and neither
    ``RANK`` nor ``WORLD_SIZE`` is set. Call it yourself if the program reads variables
    such as ``LOCAL_RANK`` earlier. If the default group is made again after
    ``dist.destroy_process_group``, the new group gets another port.
    """
    strategy = MultiWorkerMirroredStrategy()
    topology = strategy.topology
    address, port = meeting_place(strategy.collectives, topology.num_workers)
    rank, size = topology.replica_id, topology.num_replicas
    local, worker = topology.worker_comm, topology.worker_id
    values: list[int | str] = [rank, size, local.rank, local.size, worker]
    values += [topology.num_workers, rank, size, address, port]
    strategy.close()
    for name, value in zip(VARIABLES, values, strict=True):
        os.environ.setdefault(name, str(value))
    if os.environ["MASTER_PORT"] == str(port):
        _given[str(port)] = False


def use_for_env() -> None:
    """Make torch's ``env://`` rendezvous call `init_env` if no ranks are set."""
    # Import the module by name: `torch.distributed.rendezvous` is also a function.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = getattr(rendezvous, "_rendezvous_handlers", {})
    found = handlers.get("env")
    if found is None or found.__module__ == __name__:
        return

    def handler(url: str, *args: Any, **kwargs: Any) -> Any:
        environ = os.environ
        if not {"RANK", "WORLD_SIZE"} & environ.keys():
            init_env()
        elif _given.get(environ.get("MASTER_PORT", "")) and not urlparse(url).query:
            # Use a new port. With the old one, a rank that makes the new group before
            # rank 0 has destroyed the last group would join the last group's store, and
            # rank 0 would wait for this rank in vain.
            del environ["MASTER_PORT"]
            init_env()
        if environ.get("MASTER_PORT") in _given:
            _given[environ["MASTER_PORT"]] = True
        return found(url, *args, **kwargs)

    handlers["env"] = handler
