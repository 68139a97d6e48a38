"""Finds ranks that train without each other, before they save anything."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import TopologyError
from hpcstrat.integrations.torch.process_group import HpcstratProcessGroup
from hpcstrat.strategies.connection import num_calls

__all__ = ["refuse_separate_ranks"]


def refuse_separate_ranks() -> None:
    """Raise TopologyError after the first step of an optimizer, if ranks are separate.

    Ranks are separate if they have made no call to each other: neither of a process
    group, nor of a strategy of hpcstrat. The step itself may make the first call, in
    its closure or in a method of a derived optimizer.
    """
    size = Topology.world().size
    if size == 1:
        return
    calls = num_calls()
    seen: list[Any] = []

    def check(optimizer: Any, *_: Any) -> None:
        if seen:
            return
        seen.append(optimizer)
        group = dist.group.WORLD if dist.is_initialized() else None
        ours = group is None or isinstance(group, HpcstratProcessGroup)
        if num_calls() == calls and (ours or dist.get_world_size() == 1):
            found, option = "one that it does not use", ""
            if group is None:
                found = "no process group"
                option = "--make-group if it uses a group that it does not make, or "
            raise TopologyError(
                f"expected a process group by which the {size} ranks train together, "
                f"found {found} in the first step of an optimizer, so that each rank "
                "would train a copy and save into the same files; pass the program's "
                f"option that makes it distributed, or add to hpcstrat torch {option}"
                "--separate if each rank is to train alone"
            )

    register_optimizer_step_post_hook(check)
