"""Gathers and broadcasts of arrays on GPUs, see `hpcstrat.engine.calls.gathers`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.engine.arrays.kinds import array_module
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.typing import Array

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.transports.byte_movers import Mover

__all__ = ["broadcast_on_gpus", "gathered_on_gpus"]


def gathered_on_gpus(
    collectives: Any, arrays: list[Array], axis: int, call: Call
) -> list[Array]:
    """Exchange the lengths of arrays on GPUs, then gather the arrays."""
    from hpcstrat.engine.gpu.transports import byte_movers

    module: Any = array_module(arrays[0])
    channel, mover = collectives.channel, _mover(collectives, call)
    # If these copies exhaust the memory of one rank, all ranks raise in the next
    # call, before the lengths are exchanged.
    with collectives.all_raise(call.text):
        parts = [module.ascontiguousarray(np.moveaxis(a, axis, 0)) for a in arrays]
    lengths = collectives.all_gather_object([len(part) for part in parts], call.text)
    results: list[Array] = []
    for index, part in enumerate(parts):
        counts = [row[index] * math.prod(part.shape[1:]) for row in lengths]
        rows = sum(row[index] for row in lengths)
        with collectives.all_raise(call.text):
            whole = module.empty((rows, *part.shape[1:]), part.dtype)
        if whole.size:
            flat, result = part.reshape(-1), whole.reshape(-1)
            steps = byte_movers.all_gather(mover, flat, result, counts)
            channel.drive(steps, call, collectives.timeout_seconds)
        moved_back = np.moveaxis(whole, 0, axis)
        results.append(module.ascontiguousarray(moved_back))
    return results


def broadcast_on_gpus(
    collectives: Any, arrays: list[Array], root: int, call: Call
) -> list[Array]:
    """Broadcast arrays on GPUs."""
    from hpcstrat.engine.gpu.transports import byte_movers

    channel, mover = collectives.channel, _mover(collectives, call)
    with collectives.all_raise(call.text):
        results = [array.copy("C") for array in arrays]
    filled = [result for result in results if result.size]
    steps = byte_movers.broadcast(mover, filled, filled, root)
    channel.drive(steps, call, collectives.timeout_seconds)
    return results


def _mover(collectives: Any, call: Call) -> Mover:
    """Return the mover that copies bytes between GPUs for a call."""
    from hpcstrat.engine.gpu.transports.device_group import device_group
    from hpcstrat.engine.gpu.transports.transport_select import mover

    seconds = collectives.timeout_seconds
    group = device_group(collectives.channel, call.text, seconds)
    with collectives.all_raise(call.text):
        return mover(group)
