"""Jobs on several hosts: their results, their ends, and the bytes that they send."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import testing
from tests.cluster.hosts import Hosts
from tests.mpi.programs.started import PROGRAMS, Ended, run_command

# Numbers of ranks on each host, and their ranks in a job with two ranks per host.
LAYOUTS = {(2, 2): (0, 1, 2, 3), (1, 2): (0, 2, 3), (1, 1): (1, 3)}
SHAPES = ((), (0,), (1,), (3,), (5, 7), (1 << 16, 3))
DTYPES = ("i1", "u2", "i4", "i8", "f2", "f4", "f8", "F", "D")
# Types whose arrays are also summed one by one.
ALONE = ("float32", "int64")
MIB = 1 << 20


def _strategies(comm: Any) -> Iterator[tuple[str, Any]]:
    """Yield a strategy for each sum algorithm; collective over ``comm``."""
    ways = {
        "default": None,
        "MPI": hs.MpiAllReduce(),
        "hierarchical": hs.HierarchicalCopyAllReduce(),
        "to one": hs.ReductionToOneDevice("CPU:1"),
    }
    for way, ops in ways.items():
        with hs.MultiWorkerMirroredStrategy(
            comm=comm, cross_device_ops=ops
        ) as strategy:
            yield way, strategy


def _same_on_all(comm: Any, value: Any) -> bool:
    return len(set(comm.allgather(value))) == 1


def _check_topology(strategy: Any, ranks: Sequence[int]) -> None:
    topology = strategy.topology
    starts = np.cumsum([0, *ranks])
    worker = int(np.searchsorted(starts, topology.replica_id, side="right")) - 1
    assert topology.num_workers == len(ranks)
    assert topology.num_replicas == sum(ranks)
    assert topology.worker_id == worker
    expected = list(range(starts[worker], starts[worker + 1]))
    assert topology.worker_replicas == expected
    names = topology.replica_comm.allgather(topology.mpi.Get_processor_name())
    assert names == [f"node{i}" for i, n in enumerate(ranks, 1) for _ in range(n)]


def _parts(dtype: str, shape: tuple[int, ...], size: int) -> list[Any]:
    """Return the arrays of all ranks, with small integers, whose sums are exact."""
    count = int(np.prod(shape))
    numbers = np.arange(count).reshape(shape) % 7
    parts = [np.asarray(numbers + rank).astype(dtype) for rank in range(size)]
    return [p * (1 + 1j) if p.dtype.kind == "c" else p for p in parts]


def _check_sums(strategy: Any, way: str) -> None:
    comm = strategy.topology.replica_comm
    columns = [_parts(d, s, comm.size) for d in DTYPES for s in SHAPES]
    own = [column[comm.rank] for column in columns]
    together = strategy.reduce("sum", own, axis=None)
    for column, found in zip(columns, together, strict=True):
        case = f"{way}, {found.dtype}{list(found.shape)}"
        total = np.add.reduce(column, axis=0, dtype=column[0].dtype)
        results = [found]
        if found.dtype.name in ALONE:
            results.append(strategy.reduce("sum", column[comm.rank], axis=None))
        for result in results:
            assert result.dtype == total.dtype, case
            np.testing.assert_array_equal(result, total, err_msg=case)
    rng = np.random.default_rng(comm.rank)
    floats = rng.standard_normal(100_003)
    total = strategy.reduce("sum", floats, axis=None)
    assert _same_on_all(comm, total.tobytes()), f"{way}: the bits differ"


def _check_mismatch(strategy: Any, way: str) -> None:
    """The last rank makes a different call, and is on another host than the first."""
    comm = strategy.topology.replica_comm
    odd, last = comm.rank == comm.size - 1, strategy.topology.job_ranks[-1]
    for own in (np.ones(4 + odd), np.ones(4, "f4" if odd else "f8")):
        with pytest.raises(hs.CollectiveError, match=rf"rank {last} called"):
            strategy.reduce("sum", own, axis=None)
        # After the error, all ranks are at the same call.
        assert strategy.reduce("sum", 1, axis=None) == comm.size, way


def _check_other_collectives(strategy: Any) -> None:
    comm = strategy.topology.replica_comm
    rank, size = comm.rank, comm.size
    for root in range(size):
        text = strategy.broadcast_object({"from": rank, "x": "y" * 100_000}, root)
        assert text == {"from": root, "x": "y" * 100_000}
    parts = [np.full((r, 50_000), r, np.int16) for r in range(size)]
    np.testing.assert_array_equal(
        strategy.gather(parts[rank], axis=0), np.concatenate(parts)
    )

    def step() -> Any:
        return hs.get_replica_context().all_gather(parts[rank].T, axis=1)

    np.testing.assert_array_equal(
        strategy.local_value(strategy.run(step)), np.concatenate(parts).T
    )
    # Variables start with the value of the first replica.
    with strategy.scope():
        variable = hs.Variable(np.full(1000, rank, np.float64), name="v")
    assert not variable.value().any()
    strategy.barrier()


def _check_layouts() -> None:
    """Check the results of sums on every rank of a job."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for ranks, members in LAYOUTS.items():
        taking_part = world.rank in members
        comm = world.Split(0 if taking_part else MPI.UNDEFINED, world.rank)
        if taking_part:
            for way, strategy in _strategies(comm):
                if way == "default":
                    _check_topology(strategy, ranks)
                    _check_other_collectives(strategy)
                _check_sums(strategy, f"{way}, {ranks}")
                _check_mismatch(strategy, f"{way}, {ranks}")
            comm.Free()
        world.Barrier()


def test_hosts_are_workers_and_compute_what_one_process_does(hosts: Hosts) -> None:
    hosts.run((2, 2), _check_layouts, timeout=60)
    assert not hosts.processes()


def _leave(launch: Sequence[str], way: str) -> Ended:
    """Run a program whose last rank, on the second host, exits while others wait."""
    program = [sys.executable, str(PROGRAMS / "leave.py"), way, "reduce", "3"]
    ended = run_command([*launch, *program], way, 30, {})
    if ended.returncode is None:
        # Open MPI's mpirun may hang after all ranks have ended: see "Ranks that
        # disagree, fail or leave" in docs/user-guide/faults.md. A rank that hangs
        # would do so again.
        ended = run_command([*launch, *program], way, 30, {})
    return ended


def test_end_of_a_rank_on_another_host_ends_the_job_and_is_explained(
    hosts: Hosts,
) -> None:
    said = {
        "error": "ValueError: the cause",
        "exit3": "rank 3 had left the program",
        "kill": "",
    }
    launch = testing.launch_command(4, hosts.launcher((2, 2)))
    # Run the jobs at the same time, because they mostly wait.
    with ThreadPoolExecutor(len(said)) as pool:
        all_ended = list(pool.map(lambda way: _leave(launch, way), said))
    for ended, text in zip(all_ended, said.values(), strict=True):
        assert ended.returncode, str(ended)
        assert text in ended.stderr, str(ended)
        assert not ended.survivors, str(ended)


def _sent_by_reductions(count: int, nbytes: int) -> tuple[int, int]:
    """Return a rank's worker, and the bytes that its host sent for some reductions."""
    sent = Path("/sys/class/net/eth0/statistics/tx_bytes")
    ops = hs.HierarchicalCopyAllReduce()
    with hs.MultiWorkerMirroredStrategy(cross_device_ops=ops) as strategy:
        topology = strategy.topology
        own = np.full(nbytes // 4, topology.replica_id, np.float32)
        total = np.empty_like(own)
        # The first reduction opens connections, and is not counted.
        for times in (1, count):
            topology.replica_comm.Barrier()
            before = int(sent.read_text())
            # No rank of this host sends before the counter is read, and no host reads
            # its counter before all messages have arrived.
            topology.worker_comm.Barrier()
            for _ in range(times):
                strategy.reduce("sum", own, axis=None, out=total)
            topology.replica_comm.Barrier()
            after = int(sent.read_text())
        assert np.all(total == sum(range(topology.num_replicas)))
        return topology.worker_id, after - before


def test_hierarchical_reduction_sends_little_more_than_it_must(hosts: Hosts) -> None:
    count = 8
    # Placement in turn is the worst one for an algorithm that ignores hosts.
    found = hosts.run(
        (4, 4), _sent_by_reductions, count, MIB, round_robin=True, timeout=60
    )
    assert [worker for worker, _ in found] == [0, 1] * 4
    for _, sent in found[:2]:
        per_reduction = sent / count
        # With two hosts, each host must send its sum once.
        assert MIB <= per_reduction <= 1.1 * MIB, f"{per_reduction:.0f} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (1, 2)])
def test_rank_tests_pass_over_hosts(hosts: Hosts, ranks: Sequence[int]) -> None:
    # The excluded tests check the placement of ranks on one machine.
    words = "two_replicas_per_worker", "topology", "harness", "another_strategy"
    command = [sys.executable, "-m", "tests.mpi.ranks", "--color=no"]
    command += ["-k", " and not ".join(words)]
    finished = hosts.launch(ranks, command, timeout=280)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert " passed" in finished.stdout
