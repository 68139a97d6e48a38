"""The ways to sum arrays on GPUs: hpcstrat by each transport, MPI, NCCL, and by hand.

What cannot be done on a machine is left out, with the reason in the results: to give an
MPI library that cannot read the memory of GPUs a pointer to it ends the program.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from devices import Bench

import hpcstrat as hs
from hpcstrat.engine.gpu.capabilities import Capabilities, gather

__all__ = ["BY_HAND", "FLOOR", "MPI", "NCCL", "OURS", "TORCH", "Floor", "Ways"]

OURS = "hpcstrat"
MPI = "mpi4py, device buffers"
NCCL = "nccl, by CuPy"
TORCH = "torch nccl"
BY_HAND = "mpi4py, by hand through the host"
FLOOR = "copies"


class Staging(hs.CrossDeviceOps):
    """The library's choice on the host, with copies there and back, also on GPUs.

    Not collective. An algorithm that is a program's own is always one of the host.
    """

    def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Choose as the library does.

        Not collective.

        Parameters
        ----------
        *args, **kwargs : object
            See ``CrossDeviceOps.choose``.

        Returns
        -------
        Choice
            Algorithm and size of the pieces.
        """
        return super().choose(*args, **kwargs)


# Each names a transport on GPUs, as it names an algorithm on the host.
_NAMED = (
    hs.NcclAllReduce,
    hs.SharedMemoryAllReduce,
    hs.HierarchicalCopyAllReduce,
    hs.MpiAllReduce,
    Staging,
)


class _Told(logging.Handler):
    """Keeps what the library says about its choice of a transport."""

    _START = "arrays on GPUs are reduced by "

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.latest = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason of the latest choice."""
        text = record.getMessage()
        if text.startswith(self._START):
            self.latest = text.removeprefix(self._START)


class Floor:
    """The copies in a GPU's memory that a sum of ``n`` bytes cannot do without.

    Memory of CuPy's pool cannot be opened by another process. So each of ``p`` ranks
    reads and writes ``n`` bytes to lay them out; reads ``n`` and writes ``n / p`` to
    sum its share; and reads and writes ``n`` to collect the shares: as much traffic as
    copies of ``(5 + 1 / p) / 2 n`` bytes, which all ranks make at once. Where ranks
    share a GPU, they share its memory, and the copies take as much longer. One rank has
    nothing to exchange: a copy of ``n`` bytes.

    Parameters
    ----------
    bench : Bench
        Where.
    own, total : cupy.ndarray of shape (n,)
        From where, and to where.
    """

    FORMULA = "copies of (5 + 1/ranks) / 2 times the bytes; of the bytes, for one rank"

    def __init__(self, bench: Bench, own: Any, total: Any):
        ranks = bench.comm.size
        self.pairs = [(total, own)]
        if ranks > 1:
            between = bench.cupy.empty_like(own)
            part = slice(0, int(own.size * (1 + 1 / ranks) / 2))
            self.pairs = [(between, own), (total[part], between[part])]
            self.pairs += [(total, between)]
        self.nbytes = sum(source.nbytes for _, source in self.pairs)
        self.copy = bench.cupy.copyto

    def __call__(self) -> None:
        """Make the copies.

        Not collective.
        """
        for target, source in self.pairs:
            self.copy(target, source)


class Ways:
    """What serves for sums on this machine, set up once.

    Collective over all replicas.

    Parameters
    ----------
    bench : Bench
        Where.
    named : bool
        Whether each transport of hpcstrat that can be named is wanted, too.

    Attributes
    ----------
    able : Capabilities
        What the library has found out.
    left_out : dict of str to str
        What cannot be done here, and why.
    transports : dict of str to str
        Which transport serves for a way of hpcstrat, and why.
    """

    def __init__(self, bench: Bench, *, named: bool):
        self.bench = bench
        self.left_out: dict[str, str] = {}
        self.transports: dict[str, str] = {}
        self._told = _Told()
        logger = logging.getLogger("hpcstrat.device")
        logger.addHandler(self._told)
        logger.setLevel(logging.INFO)
        topology = bench.strategy.topology
        self.able: Capabilities = gather(topology)
        self.strategies = {OURS: bench.strategy}
        self._try(OURS, bench.strategy)
        for kind in _NAMED if named else ():
            strategy = hs.MultiWorkerMirroredStrategy(cross_device_ops=kind())
            self._try(f"{OURS}, {kind.__name__}", strategy)
        self.nccl = self._raw_nccl()
        self.torch = self._torch()
        if not self.able.mpi_allreduce:
            self.left_out[MPI] = self.able.mpi_allreduce.reason

    def _try(self, name: str, strategy: Any) -> None:
        """Sum a few numbers, and see whether the library does it, and by what."""
        bench = self.bench
        with bench.stream:
            own = bench.cupy.ones(1024, np.float32)
            try:
                total = strategy.reduce("sum", own, axis=None)
            except ValueError as error:
                # On every rank: nobody waits.
                self.left_out[name] = str(error)
                return
            assert float(total[-1]) == bench.comm.size
        served = bench.comm.bcast(self._told.latest or "no transport: one replica")
        kind = served.partition(":")[0]
        same = [n for n, text in self.transports.items() if text.startswith(f"{kind}:")]
        if same and name != OURS:
            self.left_out[name] = f"is served by {kind}, as {same[0]}"
            return
        self.transports[name] = served
        self.strategies[name] = strategy

    def _raw_nccl(self) -> Any:
        """Return a communicator of NCCL, by CuPy; None where there is none."""
        bench, able = self.bench, self.able
        if not able.nccl:
            self.left_out[NCCL] = able.nccl.reason
            return None
        from cupy.cuda import nccl

        identity = nccl.get_unique_id() if bench.comm.rank == 0 else None
        identity = bench.comm.bcast(identity)
        return nccl.NcclCommunicator(bench.comm.size, identity, bench.comm.rank)

    def _torch(self) -> Any:
        """Return ``torch.distributed`` on NCCL; None where there is none."""
        bench = self.bench
        reason = ""
        if bench.comm.size == 1 or not self.able.one_gpu_per_rank:
            reason = "wants several ranks, with a GPU each"
        else:
            try:
                import torch

                if not torch.cuda.is_available():
                    reason = "torch has no CUDA"
            except ImportError:
                reason = "torch is not installed"
        reasons = [text for text in bench.comm.allgather(reason) if text]
        if reasons:
            self.left_out[TORCH] = reasons[0]
            return None
        return self._start_torch()

    def _start_torch(self) -> Any:
        import torch
        from torch import distributed

        comm = self.bench.comm
        torch.cuda.set_device(self.bench.cupy.cuda.runtime.getDevice())
        host = comm.bcast(socket.gethostname())
        store = None
        if comm.rank == 0:
            # The system picks a free port.
            store = distributed.TCPStore(
                host, 0, comm.size, is_master=True, wait_for_workers=False
            )
        port = comm.bcast(store and store.port)
        if store is None:
            store = distributed.TCPStore(host, port, comm.size, is_master=False)
        distributed.init_process_group(
            "nccl", store=store, rank=comm.rank, world_size=comm.size
        )
        self.bench.hardware["torch"] = torch.__version__
        return distributed

    def flat(self, own: Any, total: Any) -> dict[str, Callable[[], Any]]:
        """Return what sums one buffer without hpcstrat; each returns where the sum is.

        Not collective; the calls are, over all replicas.

        Parameters
        ----------
        own : cupy.ndarray of shape (n,)
            This rank's float32 numbers.
        total : cupy.ndarray of shape (n,)
            For the sum.

        Returns
        -------
        dict of str to callable
            Without arguments.
        """
        bench = self.bench
        cupy, comm, stream = bench.cupy, bench.comm, bench.stream

        def by_hand() -> Any:
            host = cupy.asnumpy(own)
            comm.Allreduce(bench.mpi.IN_PLACE, host)
            return cupy.asarray(host)

        def by_mpi() -> Any:
            # MPI knows nothing of streams.
            stream.synchronize()
            comm.Allreduce(own, total)
            return total

        ways: dict[str, Callable[[], Any]] = {BY_HAND: by_hand}
        if self.able.mpi_allreduce:
            ways[MPI] = by_mpi
        if self.nccl is not None:
            from cupy.cuda import nccl

            def by_nccl() -> Any:
                self.nccl.allReduce(
                    *(own.data.ptr, total.data.ptr, own.size),
                    *(nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr),
                )
                return total

            ways[NCCL] = by_nccl
        if self.torch is not None:
            ways[TORCH] = self._by_torch(own, total)
        return ways

    def _by_torch(self, own: Any, total: Any) -> Callable[[], Any]:
        import torch

        stream = torch.cuda.ExternalStream(self.bench.stream.ptr)
        source, target = torch.from_dlpack(own), torch.from_dlpack(total)

        def by_torch() -> Any:
            with torch.cuda.stream(stream):
                target.copy_(source)
                self.torch.all_reduce(target)
            return total

        return by_torch

    def close(self) -> None:
        """End what was set up.

        Collective over all replicas.
        """
        if self.torch is not None:
            self.torch.destroy_process_group()
        if self.nccl is not None:
            self.nccl.destroy()
        for strategy in self.strategies.values():
            strategy.close()

    def report(self) -> str:
        """Say what serves, and what is left out.

        Not collective.

        Returns
        -------
        str
            A line for each way.
        """
        lines = [f"{name}: by {text}" for name, text in self.transports.items()]
        lines += [f"left out: {name}: {text}" for name, text in self.left_out.items()]
        return "\n".join(lines)
