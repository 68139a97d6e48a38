"""Chooses the transport for arrays on GPUs.

The choice depends only on the capabilities that all ranks have agreed on, on the
options and on the topology, so that it is the same on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from hpcstrat.engine.algorithms import select
from hpcstrat.engine.algorithms.select import Choice
from hpcstrat.engine.algorithms.work import Algorithm
from hpcstrat.engine.gpu.transports.byte_movers import Mover, NcclMover, StagedMover
from hpcstrat.engine.gpu.transports.device_group import DeviceGroup
from hpcstrat.engine.gpu.transports.device_reduction import Transport, reduce_on_device
from hpcstrat.engine.gpu.transports.mpi_transport import MpiTransport
from hpcstrat.engine.gpu.transports.staging_transport import StagingTransport
from hpcstrat.engine.options import CommunicationImplementation, CommunicationOptions
from hpcstrat.engine.topology.topology import Topology

__all__ = ["mover", "nccl", "ring", "select_on_gpu", "staged"]

# Size of a piece: most models fit in one piece, and buffers have a bounded size.
_PIECE_BYTES = 64 << 20

Choose = Callable[[int, Topology, CommunicationOptions], Choice]


def select_on_gpu(
    nbytes: int, group: DeviceGroup, options: CommunicationOptions
) -> Choice:
    """Choose the transport of a reduction of GPU arrays; the same on every rank.

    ``nbytes`` is the total size of the arrays, in the types in which they are added.
    Raises ValueError on every rank if the requested implementation is not available.
    """
    able, wanted = group.capabilities, options.implementation
    if wanted is CommunicationImplementation.NCCL:
        return nccl(group, options)
    if wanted is CommunicationImplementation.RING:
        if not able.mpi_sendrecv:
            raise ValueError(
                "expected an MPI that moves the memory of GPUs for implementation RING,"
                f" found that it does not: {able.mpi_sendrecv.reason}; leave "
                "implementation out"
            )
        return ring(group, options)
    # NCCL and MPI cannot send half-precision numbers instead of wider types.
    if able.nccl and options.wire_dtype is None:
        return nccl(group, options)
    if able.mpi_sendrecv and options.wire_dtype is None:
        return ring(group, options)
    return staged(nbytes, group, options, select.select)


def nccl(
    group: DeviceGroup, options: CommunicationOptions, *, in_half: bool = False
) -> Choice:
    """Return the all-reduce of NCCL; raise ValueError if the ranks cannot use NCCL.

    If ``in_half``, arrays of half types are added in half precision.
    """
    reason = group.capabilities.nccl.reason
    if group.nccl is None:
        raise ValueError(
            f"expected NCCL on all ranks, found that it cannot be used: {reason}; "
            "leave the choice to the library"
        )
    group.explain("nccl", reason)
    choice = _choice(group.nccl, options)
    return choice.with_options(in_half=True) if in_half else choice


def ring(group: DeviceGroup, options: CommunicationOptions) -> Choice:
    """Return the reduction by MPI messages with GPU memory."""
    able = group.capabilities
    known = [able.mpi_sendrecv.reason, *_why_not(group, nccl="NCCL")]
    group.explain("messages of MPI", "; ".join(known))
    made = group.transport("ring", lambda: MpiTransport(group.topology, group.lane))
    return _choice(made, options)


def staged(
    nbytes: int,
    group: DeviceGroup,
    options: CommunicationOptions,
    choose: Choose,
    name: str = "",
) -> Choice:
    """Return a reduction on the host, with copies from the GPU and back.

    ``choose`` selects the algorithm for host arrays. ``name`` is the name of this
    choice for the log; empty for the library's own choice.
    """
    reasons = _why_not(
        group, nccl="NCCL", mpi_sendrecv="memory of GPUs in messages of MPI"
    )
    group.explain(
        f"{name or 'algorithms'} on the host, with copies there and back",
        "; ".join(reasons) or "the program asks for it",
    )
    # Integers are never rounded to half precision, even if ``wire_dtype`` is set.
    exactly = replace(options, wire_dtype=None)

    def choose_for(size: int, exact: bool) -> tuple[Algorithm, int]:
        choice = choose(size, group.topology, exactly if exact else options)
        return choice.algorithm, choice.piece_bytes

    # This call raises an error if the algorithm does not support the topology.
    starts = choose(nbytes, group.topology, options).starts
    made = group.transport("staging", lambda: StagingTransport(group.lane, choose_for))
    return replace(_choice(made.choosing(choose_for), options), starts=starts)


def mover(group: DeviceGroup) -> Mover:
    """Return the mover of arrays between GPUs: by NCCL, or through host memory.

    The mover is ready for a call. If this function fails on one rank, the other ranks
    do not learn of it, so callers wrap it in `all_raise`.
    """
    if group.nccl is not None:
        return NcclMover(group.nccl.group, group.lane)
    return group.transport("mover", lambda: StagedMover(group.topology, group.lane))


def _why_not(group: DeviceGroup, **words: str) -> list[str]:
    """Return a text with the reason for each ability in ``words`` that ranks lack."""
    abilities = {name: getattr(group.capabilities, name) for name in words}
    return [
        f"not {words[name]}: {ability.reason}"
        for name, ability in abilities.items()
        if not ability
    ]


def _choice(transport: Transport, options: CommunicationOptions) -> Choice:
    algorithm = functools.partial(reduce_on_device, transport=transport)
    return Choice(algorithm, max(64, options.bytes_per_pack or _PIECE_BYTES))
