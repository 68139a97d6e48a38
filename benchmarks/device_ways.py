"""Alternatives that sum arrays on GPUs: hpcstrat, MPI, NCCL, and code by hand.

An alternative that does not work on a machine is left out, and the results have the
reason. For example, a pointer to GPU memory crashes an MPI library that cannot read
such memory.
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
    """The library's choice for host arrays, used for GPU arrays by copies to the host.

    Not collective. A program's own algorithm always runs on the host.
    """

    def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Choose an algorithm as the library does for host arrays.

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


# Each class selects a transport on GPUs, and an algorithm on the host.
_NAMED = (
    hs.NcclAllReduce,
    hs.SharedMemoryAllReduce,
    hs.HierarchicalCopyAllReduce,
    hs.MpiAllReduce,
    Staging,
)


class _Told(logging.Handler):
    """A log handler that keeps the library's reason for its choice of a transport."""

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
    """The copies in a GPU's memory that every sum of ``n`` bytes needs.

    Memory of CuPy's pool cannot be opened by another process. Therefore each of ``p``
    ranks reads and writes ``n`` bytes to lay them out; reads ``n`` and writes ``n / p``
    to sum its share; and reads and writes ``n`` to collect the shares: as much traffic
    as copies of ``(5 + 1 / p) / 2 n`` bytes, which all ranks make at once. If ranks
    share a GPU, they share its memory bandwidth, and the copies take longer
    accordingly. A single rank needs only a copy of ``n`` bytes.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    own, total : cupy.ndarray of shape (n,)
        Source and target of the copies.
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
    """The ways to sum that work on this machine, set up once.

    Collective over all replicas.

    Parameters
    ----------
    bench : Bench
        The GPUs, streams and clocks of the measurement.
    named : bool
        Whether to include each transport of hpcstrat that can be named.

    Attributes
    ----------
    able : Capabilities
        The capabilities that the library has detected.
    left_out : dict of str to str
        Reason for each alternative that does not work here.
    transports : dict of str to str
        Transport of each hpcstrat alternative, with the reason.
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
        """Sum a few numbers by hpcstrat, and record the transport or the error."""
        bench = self.bench
        with bench.stream:
            own = bench.cupy.ones(1024, np.float32)
            try:
                total = strategy.reduce("sum", own, axis=None)
            except ValueError as error:
                # The error is raised on every rank, so that no rank waits.
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
        """Return a communicator of NCCL, by CuPy, or None if that is not available."""
        bench, able = self.bench, self.able
        if not able.nccl:
            self.left_out[NCCL] = able.nccl.reason
            return None
        from cupy.cuda import nccl

        identity = nccl.get_unique_id() if bench.comm.rank == 0 else None
        identity = bench.comm.bcast(identity)
        return nccl.NcclCommunicator(bench.comm.size, identity, bench.comm.rank)

    def _torch(self) -> Any:
        """Return ``torch.distributed`` on NCCL, or None if that is not available."""
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
            # Port 0 lets the system choose a free port.
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
        """Return calls that sum a buffer without hpcstrat; each call returns the sum.

        Not collective; the returned calls are collective over all replicas.

        Parameters
        ----------
        own : cupy.ndarray of shape (n,)
            This rank's float32 numbers.
        total : cupy.ndarray of shape (n,)
            Receives the sum.

        Returns
        -------
        dict of str to callable
            The calls by name; they take no arguments.
        """
        bench = self.bench
        cupy, comm, stream = bench.cupy, bench.comm, bench.stream

        def by_hand() -> Any:
            host = cupy.asnumpy(own)
            comm.Allreduce(bench.mpi.IN_PLACE, host)
            return cupy.asarray(host)

        def by_mpi() -> Any:
            # Synchronize first, because MPI does not know streams.
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
        """Close strategies and communicators.

        Collective over all replicas.
        """
        if self.torch is not None:
            self.torch.destroy_process_group()
        if self.nccl is not None:
            self.nccl.destroy()
        for strategy in self.strategies.values():
            strategy.close()

    def report(self) -> str:
        """Return a text about the alternatives that work, and the ones left out.

        Not collective.

        Returns
        -------
        str
            A line for each alternative.
        """
        lines = [f"{name}: by {text}" for name, text in self.transports.items()]
        lines += [f"left out: {name}: {text}" for name, text in self.left_out.items()]
        return "\n".join(lines)
