"""torch's gloo as a measured alternative, if torch is installed."""

from __future__ import annotations

import os
import socket
from typing import Any

import hpcstrat as hs

__all__ = ["start_gloo"]


def start_gloo(strategy: hs.MultiWorkerMirroredStrategy, interface: str = "lo") -> Any:
    """Initialize torch's gloo, and print its configuration.

    Collective over all replicas.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    interface : str
        Name of the network interface; ``"lo"`` on one machine only.

    Returns
    -------
    module or None
        ``torch.distributed``; None without torch, or with several machines and ``lo``.
    """
    comm = strategy.topology.replica_comm
    try:
        import torch
        from torch import distributed
    except ImportError:
        torch = None
    reached = interface != "lo" or strategy.topology.worker_comm.size == comm.size
    if not comm.allreduce(torch is not None and reached, op=strategy.topology.mpi.LAND):
        hs.print_once("torch gloo: left out, no torch, or several machines")
        return None
    num_threads = max(len(os.sched_getaffinity(0)) // comm.size, 1)
    torch.set_num_threads(num_threads)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    own = (
        "127.0.0.1" if interface == "lo" else socket.gethostbyname(os.uname().nodename)
    )
    host, store = comm.bcast(own), None
    if comm.rank == 0:
        # Port 0 lets the system choose a free port.
        store = distributed.TCPStore(
            host, 0, comm.size, is_master=True, wait_for_workers=False
        )
    port = comm.bcast(store and store.port)
    if store is None:
        store = distributed.TCPStore(host, port, comm.size, is_master=False)
    distributed.init_process_group(
        "gloo", store=store, rank=comm.rank, world_size=comm.size
    )
    hs.print_once(
        f"torch gloo: torch {torch.__version__}, world size {comm.size}, interface "
        f"{interface}, {torch.get_num_threads()} threads per rank"
    )
    return distributed
