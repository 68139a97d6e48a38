"""Helpers that drive transports like strategies: header, steps, ordered results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hpcstrat.engine.algorithms.work import Work
from hpcstrat.engine.arrays.packing import cut, wire_dtype
from hpcstrat.engine.channel.call import describe_call
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.gpu.transports.device_reduction import reduce_on_device
from hpcstrat.engine.topology.topology import Topology
from tests.gpu.jobs import why_not

Kinds = Sequence[tuple[str, int]]

in_step = settings(
    *(),
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

DTYPES = (
    *("float32", "float64", "float16", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
# Zero, one, fewer than ranks, as many, not divisible, several chunks and pieces.
SIZES = (0, 1, 2, 3, 4, 5, 7, 63, 64, 65, 1000, 4099)
KINDS = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.sampled_from(SIZES)), min_size=1, max_size=4
)


@dataclass
class Team:
    """The ranks of a job as workers, with a channel, and a lane on each rank's GPU."""

    topology: Any
    channel: Any
    lane: Any

    @property
    def size(self) -> int:
        """Number of replicas in the team."""
        return int(self.topology.num_replicas)

    @property
    def rank(self) -> int:
        """Number of this replica, from 0."""
        return int(self.topology.replica_id)


def shared_team(
    transport: str, replicas_per_worker: int | None = None
) -> Iterator[Team]:
    """Yield a team of all ranks, for a fixture; collective over the job.

    The fixture skips its test if the transport cannot serve the ranks' GPUs, see
    tests/gpu/jobs.py.
    """
    cupy = pytest.importorskip("cupy")
    from mpi4py import MPI

    from hpcstrat.engine.gpu.streams import Lane

    size = MPI.COMM_WORLD.size
    if size == 1:
        pytest.skip("one rank has nobody to reduce with")
    if replicas_per_worker is not None and replicas_per_worker >= size:
        pytest.skip("all ranks are one worker again")
    require_here(transport, size)
    topology = Topology(replicas_per_worker=replicas_per_worker)
    gpus = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(topology.replica_id % gpus).use()
    made = Team(topology, Channel(topology), Lane())
    yield made
    made.lane.synchronize()
    made.channel.close()
    topology.close()


def require_here(transport: str, size: int) -> None:
    """Skip a test if the transport cannot serve ``size`` ranks on these GPUs."""
    if reason := why_not_here(transport, size):
        pytest.skip(reason)


def why_not_here(transport: str, size: int) -> str:
    """Return why the transport cannot serve ``size`` ranks here, or ""."""
    import cupy

    gpus = cupy.cuda.runtime.getDeviceCount()
    return why_not(transport, size, gpus, standin=hasattr(cupy, "_standin"))


def values(kind: tuple[str, int], replica: int, seed: int) -> Any:
    """Return one replica's array of integers, whose sums are exact in all types."""
    dtype, size = np.dtype(kind[0]), kind[1]
    generator = np.random.default_rng([seed, replica])
    low = 0 if dtype.kind == "u" else -40
    numbers = generator.integers(low, 40, size).astype(dtype)
    if dtype.kind == "c":
        numbers += 1j * generator.integers(-40, 40, size)
    return numbers


def expected(kind: tuple[str, int], size: int, seed: int, *, mean: bool) -> Any:
    """Return the sum or mean over replicas, as `CrossDeviceOps` defines it."""
    wire, narrows = wire_dtype(np.dtype(kind[0]), mean)
    total = np.zeros(kind[1], wire)
    for replica in range(size):
        total += values(kind, replica, seed).astype(wire)
    if mean:
        total /= size
    return total.astype(kind[0]) if narrows else total


@dataclass
class Reduction:
    """One reduction: the kinds of its arrays, and where the results go."""

    kinds: Kinds
    seed: int
    mean: bool = False
    in_place: bool = False
    piece_bytes: int = 1 << 20

    def arrays(self, rank: int) -> tuple[list[Any], list[Any]]:
        """Return source arrays, made in the program's stream, and result arrays."""
        import cupy

        sources = [
            cupy.asarray(values(kind, rank, self.seed)) * 1 for kind in self.kinds
        ]
        sources = [
            source.astype(kind[0])
            for source, kind in zip(sources, self.kinds, strict=True)
        ]
        results = []
        for source, kind in zip(sources, self.kinds, strict=True):
            wire, narrows = wire_dtype(np.dtype(kind[0]), self.mean)
            dtype = np.dtype(kind[0]) if narrows else wire
            same = self.in_place and dtype == source.dtype
            results.append(source if same else cupy.empty(kind[1], dtype))
        return sources, results

    def work(self, size: int, sources: Any, results: Any) -> Work:
        """Return the work of this reduction."""
        signatures = [(np.dtype(dtype), (length,)) for dtype, length in self.kinds]
        call = describe_call("test", f"{self.kinds} {self.seed} {self.mean}")
        pieces = tuple(cut(signatures, self.mean, self.piece_bytes))
        divisor = size if self.mean else 0
        return Work(call, pieces, sources, results, self.piece_bytes, divisor)

    def check(self, comm: Any, results: Sequence[Any]) -> None:
        """Compare the results with NumPy's, and their bits with other ranks' bits."""
        hosts = [result.get() for result in results]
        for kind, host in zip(self.kinds, hosts, strict=True):
            wanted = expected(kind, comm.size, self.seed, mean=self.mean)
            assert host.dtype == wanted.dtype
            np.testing.assert_array_equal(host, wanted, str(kind))
        same_bits(comm, hosts)


def same_bits(comm: Any, hosts: Sequence[Any]) -> None:
    """Assert that arrays have the same bits as those of the other ranks."""
    bits = [host.tobytes() for host in hosts]
    assert comm.bcast(bits, 0) == bits


def reduce_now(
    team: Team, transport: Any, reduction: Reduction, **options: Any
) -> list[Any]:
    """Make a call that waits for its end, like `Collectives`."""
    sources, results = reduction.arrays(team.rank)
    work = reduction.work(team.size, sources, results)
    if work.pieces:
        steps = reduce_on_device(work, team.channel, transport, **options)
        team.channel.drive(steps, work.call)
    return results


def reduce_many(
    team: Team, transport: Any, reductions: Sequence[Reduction], polls: int
) -> None:
    """Start calls, compute at the same time, and check the results."""
    import cupy

    from hpcstrat.engine.gpu.streams import Mark

    started: list[tuple[Reduction, Any, Any, list[Any]]] = []
    for reduction in reductions:
        sources, results = reduction.arrays(team.rank)
        work = reduction.work(team.size, sources, results)
        if work.pieces:
            begin, end = Mark().record(), Mark()
            steps = reduce_on_device(work, team.channel, transport, begin, end)
            handle = PendingCall(team.channel, work.call, steps, results)
            started.append((reduction, handle, end, results))
    numbers = cupy.arange(1000)
    for _ in range(polls):
        numbers = numbers + 1
        time.sleep(0.0002 * team.rank)
        team.channel.pending.progress()
    for reduction, handle, end, results in started:
        assert handle.wait() is results
        end.join()
        reduction.check(team.topology.replica_comm, results)
    assert int(numbers[0]) == polls
