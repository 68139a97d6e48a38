"""Communicators, the shared memory of a worker, and when each is freed."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.topology import segment as segments
from hpcstrat.engine.topology.segment import Segment, SharedFile
from hpcstrat.engine.topology.topology import Topology
from tests.mpi.ranks.outcomes import assert_usable, outcome

pytestmark = [pytest.mark.rule, pytest.mark.algorithm]


def test_workers_are_runs_of_replicas(
    topology: Any, job: Any, topology_layout: Any
) -> None:
    per_worker = topology_layout.replicas_per_worker or job.size
    assert (topology.replica_id, topology.num_replicas) == (job.rank, job.size)
    assert topology.worker_id == job.rank // per_worker
    replicas = topology.worker_comm.allgather(job.rank)
    first = topology.worker_id * per_worker
    assert replicas == list(range(first, min(first + per_worker, job.size)))


@pytest.mark.parametrize(
    "cores",
    [
        lambda rank: {5},
        lambda rank: {rank},
        lambda rank: set(range(13)),
        lambda rank: {3 * rank, 3 * rank + 1, 3 * rank + 2},
        lambda rank: set(range(8)) if rank else {0, 1},
    ],
    ids=["one", "one each", "in common", "three each", "fewer for one"],
)
def test_cores_are_shared_by_all_ranks_of_the_node(
    cores: Any, topology_layout: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores(job.rank))
    made = Topology(job, replicas_per_worker=topology_layout.replicas_per_worker)
    each = made.cores_each
    made.close()
    every = job.allgather(cores(job.rank))
    own = every[job.rank]
    alone = sum(sum(core in other for other in every) == 1 for core in own)
    assert max(1, alone) <= each <= len(own)
    assert job.allreduce(each) <= max(len(set().union(*every)), job.size)
    if all(other == own for other in every):
        assert each == max(1, len(own) // job.size)


@pytest.mark.once
def test_cores_are_shared_with_ranks_outside_of_the_topology(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    pair = job.Split(job.rank // 2, job.rank)
    whole, part = Topology(job), Topology(pair)
    assert whole.shares_cores == part.shares_cores == (job.size > 2)
    part.close()
    whole.close()
    pair.Free()


def test_cross_worker_comm_joins_the_same_position_of_every_worker(
    topology: Any, job: Any
) -> None:
    position = topology.worker_comm.rank
    places = job.allgather((topology.worker_id, position))
    peers = topology.cross_worker_comm.allgather(job.rank)
    assert peers == [r for r, place in enumerate(places) if place[1] == position]
    workers = topology.cross_worker_comm.allgather(topology.worker_id)
    assert workers == sorted(workers)


def test_communicators_are_the_topologys_own(topology: Any, job: Any) -> None:
    from mpi4py import MPI

    comms = (topology.replica_comm, topology.worker_comm, topology.cross_worker_comm)
    for comm in comms:
        assert comm != MPI.COMM_WORLD
        assert MPI.Comm.Compare(comm, job) != MPI.IDENT
    assert MPI.Comm.Compare(topology.replica_comm, job) == MPI.CONGRUENT
    # The program's own message does not match a receive of the library.
    request = job.isend("own", dest=(job.rank + 1) % job.size, tag=7)
    topology.replica_comm.Barrier()
    assert job.recv(source=(job.rank - 1) % job.size, tag=7) == "own"
    request.wait()


def test_replica_order_follows_the_communicator_that_was_given(job: Any) -> None:
    reverse = job.Split(0, -job.rank)
    for replicas_per_worker in (None, 1, 2):
        topology = Topology(reverse, replicas_per_worker=replicas_per_worker)
        assert topology.replica_id == job.size - 1 - job.rank
        ids = topology.replica_comm.allgather(topology.worker_id)
        assert ids == sorted(ids)
        assert set(ids) == set(range(topology.num_workers))
        topology.close()
    # The original communicator still belongs to the caller.
    assert reverse.allreduce(1) == job.size
    reverse.Free()


@pytest.mark.once
def test_closing_frees_all_and_may_be_repeated(topology_layout: Any, job: Any) -> None:
    from mpi4py import MPI

    # Without frees, MPI would run out of communicators in these 60 rounds.
    for _ in range(60):
        topology = topology_layout.make_topology()
        topology.close()
        topology.close()
        assert topology.closed
        assert topology.replica_comm == MPI.COMM_NULL
        assert topology.worker_comm == MPI.COMM_NULL


def test_garbage_collection_does_not_communicate(
    topology_layout: Any, job: Any
) -> None:
    if job.rank == 0:
        gc.collect()
    kept = topology_layout.make_topology()
    comms = [kept.replica_comm, kept.worker_comm, kept.cross_worker_comm]
    if job.rank == 0:
        del kept
        gc.collect()
    assert job.allreduce(1) == job.size
    for comm in comms:
        comm.Free()


@pytest.mark.parametrize("folder", ["/dev/shm", "/does/not/exist"])
def test_segment_is_shared_by_the_worker_and_zero_at_first(
    topology: Any, folder: str
) -> None:
    comm = topology.worker_comm
    part = 3 * mmap.PAGESIZE
    segment = Segment(comm, 64 * comm.size, part, folder=folder)
    assert (segment.common_bytes, segment.part_bytes) == (mmap.PAGESIZE, part)
    nbytes = segment.common_bytes + comm.size * part
    assert len(segment.buffer) == nbytes
    assert bytes(segment.buffer) == bytes(nbytes)
    comm.Barrier()
    segment.buffer[64 * comm.rank] = comm.rank + 1
    comm.Barrier()
    found = [segment.buffer[64 * rank] for rank in range(comm.size)]
    assert found == list(range(1, comm.size + 1))
    comm.Barrier()
    segment.close()


@pytest.mark.parametrize("folder", ["/dev/shm", "/does/not/exist"])
def test_segments_in_one_file_are_independent(
    job: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the memory of some of them is lacking at first."""
    page, lacking = mmap.PAGESIZE, set[int]()
    real = os.posix_fallocate

    def reserve(handle: int, start: int, length: int) -> None:
        if length > 5 * page and job.rank in lacking:
            raise OSError(28, "No space left on device")
        real(handle, start, length)

    monkeypatch.setattr(segments.os, "posix_fallocate", reserve)
    rng, file, made = np.random.default_rng(7), SharedFile(job, folder), []
    for number in range(6):
        colors, lacks = rng.integers(0, 2, (2, job.size))
        lacking.clear()
        lacking.update(np.flatnonzero(lacks))
        comm = job.Split(int(colors[job.rank]), job.rank)
        nbytes = int(rng.integers(1, 2 * page))
        one = Segment(comm, nbytes, 6 * page, file=file)
        small = file.handle >= 0 and any(
            lack and color == colors[job.rank]
            for lack, color in zip(lacks, colors, strict=True)
        )
        assert one.part_bytes == (3 * page if small else 6 * page)
        assert bytes(one.buffer) == bytes(one.common_bytes + comm.size * one.part_bytes)
        comm.Barrier()
        own = one.common_bytes + comm.rank * one.part_bytes
        mark = 1 + (number * job.size + job.rank) % 255
        one.buffer[own : own + one.part_bytes] = bytes([mark]) * one.part_bytes
        made.append((one, comm, number))
    kept = job.allreduce(sum(len(one.buffer) for one, comm, _ in made if not comm.rank))
    if file.handle >= 0:
        # Areas that did not fit keep no memory.
        assert os.fstat(file.handle).st_blocks * 512 <= kept
    job.Barrier()
    file.close()
    for one, comm, number in made:
        marks = comm.allgather(1 + (number * job.size + job.rank) % 255)
        expected = b"".join(bytes([mark]) * one.part_bytes for mark in marks)
        assert bytes(one.buffer[: one.common_bytes]) == bytes(one.common_bytes)
        assert bytes(one.buffer[one.common_bytes :]) == expected
        comm.Barrier()
        one.close()
        comm.Free()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system")
def test_no_file_is_left_in_memory_while_strategies_run(
    strategy: Any, job: Any
) -> None:
    assert_usable(strategy, job)
    pids = job.allgather(os.getpid())
    left = [p for pid in pids for p in Path("/dev/shm").glob(f"hpcstrat-{pid}-*")]
    assert left == []


def test_number_of_replicas_per_worker_is_checked() -> None:
    for number in (0, -1):
        error = outcome(Topology, replicas_per_worker=number)
        assert type(error) is ValueError


def test_mirrored_strategy_checks_its_devices(job: Any) -> None:
    names = [f"CPU:{rank}" for rank in range(job.size)]
    with hs.MirroredStrategy([f"/device:{name}" for name in names]) as strategy:
        assert strategy.devices == tuple(names)
        assert strategy.extended.worker_devices == tuple(names)
        assert strategy.run(lambda: hs.get_replica_context().devices) is not None
        assert strategy.device == names[job.rank]
    # Additional devices are logical replicas.
    with hs.MirroredStrategy([*names, "CPU:99"]) as strategy:
        assert strategy.num_replicas_in_sync == job.size + 1
        assert strategy.devices == (*names, "CPU:99")
    for wrong in (["CPU:0"] * (job.size + 1), ["TPU:0"], []):
        assert type(outcome(hs.MirroredStrategy, wrong)) is ValueError


def test_strategies_on_fewer_ranks_leave_the_others_alone(
    topology_layout: Any, job: Any
) -> None:
    for count in range(1, job.size + 1):
        color = int(job.rank >= count)
        comm = job.Split(color, job.rank)
        if topology_layout.replicas_per_worker is None or color == 0:
            with topology_layout.make_strategy(comm=comm) as strategy:
                assert strategy.num_replicas_in_sync == comm.size
                own = np.array([job.rank])
                ranks = strategy.gather(own, axis=0)
                assert list(ranks) == comm.allgather(job.rank)
        comm.Free()


def test_a_closed_strategy_refuses_calls_and_can_be_made_anew(
    make_strategy: Any, job: Any
) -> None:
    for _ in range(5):
        strategy = make_strategy()
        assert_usable(strategy, job)
        strategy.close()
        strategy.close()
        error = outcome(strategy.reduce, "sum", 1.0, axis=None)
        assert isinstance(error, hs.CollectiveError)
        assert "closed" in str(error)


def test_closing_on_one_rank_only_is_a_mismatch(make_strategy: Any, job: Any) -> None:
    if job.size == 1:
        pytest.skip("one rank is all ranks")
    strategy = make_strategy()
    error = outcome(strategy.close if job.rank == 0 else strategy.barrier)
    assert type(error) is hs.CollectiveError
    assert "close" in str(error)
    assert_usable(strategy, job)
    strategy.close()
