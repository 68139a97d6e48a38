"""Process groups of a program that ``hpcstrat torch`` runs.

The functions replace functions of ``torch.distributed`` before the program starts.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.topology import Topology, start_mpi
from hpcstrat.integrations.torch.process_group import BACKEND
from hpcstrat.integrations.torch.replacements import tell
from hpcstrat.safety.start.creation import Creation

__all__ = ["make_group", "replace_backends", "replace_function", "watch_creation"]

_START = "init_process_group"


def replace_function(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let ``change`` edit the arguments of a function of ``torch.distributed``.

    If ``change`` returns a function, this function is called instead.
    """
    found = getattr(distributed_c10d, name)
    signature = inspect.signature(found)

    @functools.wraps(found)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            # Let torch's function report wrong arguments.
            return found(*args, **kwargs)
        instead = change(given)
        return found(**given) if instead is None else instead()

    setattr(distributed_c10d, name, function)
    setattr(dist, name, function)


def replace_backends(names: Collection[str]) -> None:
    """Replace backends by ``hpcstrat`` in all groups that are made later.

    ``hpcstrat`` is also used if the program names no backend, and if it names a list
    that contains one of ``names``, such as ``cpu:gloo,cuda:nccl``.
    """
    # Every function of torch that makes a group calls this helper.
    found = getattr(distributed_c10d, "_new_process_group_helper", None)
    if found is None:
        raise ImportError(
            "expected a torch whose groups are made by _new_process_group_helper, "
            f"found {torch.__version__}; name the backend {BACKEND!r} in the program"
        )

    @functools.wraps(found)
    def helper(
        size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _means_ours(str(backend), names):
            _tell_of(backend)
            backend = BACKEND
        return found(size, rank, ranks, backend, *args, **kwargs)

    def without_mpi(given: dict[str, Any]) -> None:
        # The wheels of torch refuse the backend mpi before they call the helper.
        if str(given.get("backend")).lower() == "mpi":
            _tell_of("mpi")
            given["backend"] = BACKEND

    distributed_c10d._new_process_group_helper = helper
    if "mpi" in names:
        replace_function(_START, without_mpi)
        replace_function("new_group", without_mpi)


def _tell_of(backend: Any) -> None:
    if str(backend) != BACKEND:
        asked = "no backend" if str(backend) == "undefined" else f"backend {backend}"
        tell(f"used the backend {BACKEND} for a group of the program with {asked}")


def _means_ours(backend: str, replaced: Collection[str]) -> bool:
    words = [word.rpartition(":")[2] for word in backend.lower().split(",")]
    return not {"undefined", BACKEND, *replaced}.isdisjoint(words)


def watch_creation() -> None:
    """Let ranks that wait in ``init_process_group`` report for which ranks they wait.

    Torch's own rendezvous would wait up to 30 minutes, and names no rank.
    """
    world = Topology.world()

    def meet(given: dict[str, Any]) -> None:
        size = given.get("world_size", -1)
        if size == -1:
            size = int(os.environ.get("WORLD_SIZE", "1"))
        if world.size > 1 and size == world.size and not dist.is_initialized():
            with Creation(_START, Settings()) as creation:
                creation.meet(start_mpi(), world, describe_call(_START))

    replace_function(_START, meet)


def make_group(replaced: Collection[str]) -> None:
    """Make the default group, which is also that of the program's first call.

    Collective over all ranks of the job. If the program's ``init_process_group`` asks
    for another group, it raises a ValueError.
    """
    dist.init_process_group(BACKEND)
    own = dist.group.WORLD
    size, rank = dist.get_world_size(), dist.get_rank()
    tell(f"made the process group of {size} ranks with the backend {BACKEND}")
    used: list[dict[str, Any]] = []

    def use(given: dict[str, Any]) -> Callable[[], None] | None:
        if used or dist.group.WORLD is not own:
            return None
        _require_same(given, replaced, {"world_size": size, "rank": rank})
        used.append(given)
        _tell_of(given.get("backend") or BACKEND)
        if given.get("timeout") is not None:
            tell(f"ignored timeout={given['timeout']} of the group that was made")
        return _nothing

    replace_function(_START, use)


def _require_same(
    given: dict[str, Any], replaced: Collection[str], own: dict[str, int]
) -> None:
    """Raise ValueError if a program asks for another group than ``own``."""
    backend = str(given.get("backend") or "undefined")
    if not _means_ours(backend, replaced):
        first = backend.partition(",")[0].rpartition(":")[2]
        raise ValueError(
            f"expected {_START} with the backend {BACKEND}, as of the group that "
            f"--make-group has made, found backend={backend!r}; add --replace "
            f"{first} to hpcstrat torch"
        )
    for name, value in own.items():
        found = given.get(name, -1)
        if found not in (-1, value):
            raise ValueError(
                f"expected {_START} with {name}={value}, as of the group that "
                f"--make-group has made, found {name}={found}; let the program read "
                f"{'WORLD_SIZE' if name == 'world_size' else 'RANK'}, or leave out "
                "--make-group"
            )


def _nothing() -> None:
    """Return None, as ``init_process_group`` does."""
