"""Small reductions between workers, whose values travel in the header of the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.channel.headers import SegmentHeaders
from hpcstrat.engine.channel.interruptible import InterruptibleComm
from tests.mpi.ranks.outcomes import assert_same_bits, assert_usable, outcome

pytestmark = pytest.mark.calls

# Workers of one replica (up to four workers), and workers of unequal sizes.
WORKER_SIZES = (1, 2, 3)


@pytest.fixture(scope="module", params=WORKER_SIZES)
def workers(request: pytest.FixtureRequest, job: Any) -> Iterator[Any]:
    """Yield a strategy over several workers of the given size."""
    if request.param >= job.size:
        pytest.skip("one worker")
    with hs.MultiWorkerMirroredStrategy(replicas_per_worker=request.param) as strategy:
        yield strategy


def no_messages(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all exchanges between workers fail, except the exchange of headers."""
    # First finish comparing copies of variables that some ranks have freed.
    workers.barrier()
    for name in ("Iallreduce", "Allreduce", "start", "exchange"):
        monkeypatch.delattr(InterruptibleComm, name)


def in_order(parts: list[Any], strategy: Any, divisor: int) -> Any:
    """Return the sum over workers of each worker's sum, in the order of the ranks."""
    each = strategy.topology.worker_comm.size
    each = max(strategy.topology.replica_comm.allgather(each))
    wide = np.dtype(np.float32) if parts[0].dtype == np.float16 else parts[0].dtype
    wide = np.dtype(np.float64) if divisor and wide.kind == "i" else wide
    sums = []
    for start in range(0, len(parts), each):
        total = parts[start].astype(wide)
        for part in parts[start + 1 : start + each]:
            total = total + part.astype(wide)
        sums.append(total)
    for other in sums[1:]:
        sums[0] = sums[0] + other
    if divisor:
        sums[0] = sums[0] / wide.type(divisor)
    return sums[0].astype(parts[0].dtype if wide == np.float32 else wide)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_sum_is_that_of_the_workers_in_their_order(
    workers: Any, job: Any, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_messages(workers, monkeypatch)
    divisor = job.size if op == "mean" else 0
    for number, dtype in enumerate(("f4", "f8", "f2", "i4", "i8", "c16", "g")):
        rng = np.random.default_rng(number)
        for shape in ((), (1,), (3, 5), (300,)):
            # Values of such different sizes have another sum in another order.
            scales = 10.0 ** rng.integers(-2, 3, (job.size, *shape))
            drawn = rng.uniform(-99, 99, (job.size, *shape)) * scales
            parts = [np.asarray(part).astype(dtype) for part in drawn]
            own = [parts[job.rank], np.float32(job.rank), parts[job.rank].T]
            before = own[0].copy()
            first, count, turned = workers.reduce(op, own, axis=None)
            expected = in_order(parts, workers, divisor)
            np.testing.assert_array_equal(first, expected)
            assert first.dtype == expected.dtype
            np.testing.assert_array_equal(turned, expected.T)
            assert count == in_order(
                [np.float32(rank) for rank in range(job.size)], workers, divisor
            )
            np.testing.assert_array_equal(own[0], before)
            if dtype != "g":
                assert_same_bits(job, first, turned)


def test_the_order_is_the_same_at_any_size(workers: Any, job: Any) -> None:
    # Test up to four workers. Small sums travel in the header, larger sums by parts,
    # the largest in pieces with a short last piece.
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 9000, 70_000, 1_100_003):
        parts = list(rng.normal(size=(job.size, size)).astype(np.float32))
        whole = in_order(parts, workers, 0)
        for piece in (0, 1 << 16):
            if piece and size > 100_000:
                continue
            options = hs.CommunicationOptions(bytes_per_pack=piece)
            total = workers.collectives.batch_reduce(
                hs.ReduceOp.SUM, parts[job.rank], "reduce", options
            )
            np.testing.assert_array_equal(total, whole)


def test_results_may_be_the_values(workers: Any, job: Any) -> None:
    own = np.arange(12, dtype=np.float32).reshape(3, 4).T + job.rank
    total = np.arange(12.0).reshape(3, 4).T * job.size + sum(range(job.size))
    assert workers.reduce("sum", own, axis=None, out=own) is own
    np.testing.assert_array_equal(own, total)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_one_array_is_reduced_again_and_again_into_any_memory(
    workers: Any, job: Any, op: str
) -> None:
    divisor = job.size if op == "mean" else 0
    for shape in ((), (3, 5), (700,)):
        rng = np.random.default_rng(len(shape))
        for repetition in range(3):
            parts = [np.asarray(rng.normal(size=shape)) for _ in range(job.size)]
            expected = in_order(parts, workers, divisor)
            own, given = parts[job.rank].T, parts[job.rank].copy()
            wide = np.zeros((*reversed(shape), 2))
            outs = None, wide[..., 0], np.empty(own.shape), own
            for number, out in enumerate(outs):
                total = workers.reduce(op, own, axis=None, out=out)
                assert out is None or total is out
                np.testing.assert_array_equal(total, expected.T)
                if number < len(outs) - 1:
                    np.testing.assert_array_equal(parts[job.rank], given)
            # A different call of the same kind has its own plan.
            if repetition:
                handle = workers.collectives.start_reduce(
                    hs.ReduceOp.parse(op), given.T, "reduce"
                )
                again = workers.reduce(op, given.T, axis=None)
                np.testing.assert_array_equal(handle.wait(), expected.T)
                np.testing.assert_array_equal(again, expected.T)
    locked = np.ones(700)
    locked.flags.writeable = job.rank > 0
    error = outcome(workers.reduce, op, np.ones(700), axis=None, out=locked)
    assert isinstance(error, hs.ReplicaError if job.rank else ValueError)
    assert_usable(workers, job)


def test_one_array_beside_empty_ones_is_the_one_that_is_summed(
    workers: Any, job: Any
) -> None:
    arrays = [np.zeros(0), np.array(job.rank + 1.0), np.zeros((2, 0))]
    first, total, last = workers.reduce("sum", arrays, axis=None)
    assert (first.shape, last.shape) == ((0,), (2, 0))
    assert total == job.size * (job.size + 1) // 2


def test_started_ones_travel_in_their_headers(
    workers: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_messages(workers, monkeypatch)
    handles = [
        workers.collectives.start_reduce(
            hs.ReduceOp.SUM, np.full(size, number + job.rank), "start"
        )
        for number, size in enumerate((1, 500, 3))
    ]
    # The started reductions end before the barrier does.
    workers.barrier()
    for number, handle in enumerate(handles):
        assert (handle.wait() == number * job.size + sum(range(job.size))).all()


@pytest.mark.parametrize("odd", [0, -1])
def test_another_call_of_any_rank_is_an_error_on_all(
    workers: Any, job: Any, odd: int
) -> None:
    def reduce(size: int) -> Any:
        own = np.full(size, 1.0)
        error = outcome(workers.reduce, "sum", own, axis=None, out=own)
        # This rank received no values of the other ranks.
        assert (own == 1.0).all()
        return error

    calls = {
        "barrier": lambda: outcome(workers.barrier),
        "float64[1000]": lambda: reduce(1000),
        "float64[200000]": lambda: reduce(200_000),
    }
    faulty = odd % job.size
    for words, call in calls.items():
        error = call() if job.rank == faulty else reduce(3)
        assert isinstance(error, hs.CollectiveError), error
        assert f"rank {faulty} called" in str(error)
        assert words in str(error)
        assert "float64[3]" in str(error)
        assert len(set(job.allgather(str(error)))) == 1
        assert_usable(workers, job)


def test_ranks_that_come_between_two_looks_are_no_others(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if job.size < 3:
        pytest.skip("one worker")
    real, looked = SegmentHeaders.agreed, set[int]()

    def late(self: SegmentHeaders) -> bool:
        if self.tick not in looked:
            looked.add(self.tick)
            return False
        return real(self)

    settings = hs.Settings(limit_seconds=20)
    with hs.MultiWorkerMirroredStrategy(
        comm=job, replicas_per_worker=2, settings=settings
    ) as strategy:
        monkeypatch.setattr(SegmentHeaders, "agreed", late)
        for number in range(20):
            total = strategy.reduce("sum", np.full(3, number + job.rank), axis=None)
            assert (total == number * job.size + sum(range(job.size))).all()
        monkeypatch.undo()


@pytest.mark.parametrize("told", [0, -1])
def test_what_a_rank_tells_changes_no_sum(workers: Any, job: Any, told: int) -> None:
    channel = workers.collectives.channel
    for ranks in ({told % job.size}, set(range(job.size))):
        if job.rank in ranks:
            channel.notice = "slow disk"
        total = workers.reduce("sum", np.full(5, job.rank + 1), axis=None)
        assert (total == job.size * (job.size + 1) // 2).all()
        assert set(channel.noticed) == ranks
        channel.noticed.clear()


def test_an_error_of_one_rank_before_it_is_told(workers: Any, job: Any) -> None:
    value = np.array(["text"]) if job.rank == job.size - 1 else np.ones(3)
    error = outcome(workers.reduce, "sum", value, axis=None)
    if job.rank < job.size - 1:
        assert isinstance(error, hs.ReplicaError)
        assert error.ranks == (job.size - 1,)
    else:
        assert isinstance(error, (TypeError, ValueError))
    assert_usable(workers, job)


def test_messages_are_made_for_few_sizes(workers: Any, job: Any) -> None:
    headers = workers.collectives.channel.wire
    before = set(headers._kept)
    for size in (*range(401, 441), 403, 401):
        total = workers.reduce("sum", np.full(size, job.rank), axis=None)
        assert (total == sum(range(job.size))).all()
    assert len(set(headers._kept) - before) <= 4


def test_a_rank_without_values_sends_only_a_header(workers: Any, job: Any) -> None:
    headers = workers.collectives.channel.wire
    if job.size != 2 or headers.num_workers != 2:
        pytest.skip("only the message of one of two workers may be shorter")
    before, own = set(headers._kept), np.full(5000, job.rank, np.uint8)
    into = [np.empty_like(own) for _ in range(2)] if job.rank == 1 else None
    workers.collectives.moves.gather_into(own, into, 1, "gather")
    for rank, array in enumerate(into or ()):
        assert (array == rank).all()
    [(nbytes, sent)] = set(headers._kept) - before
    assert nbytes >= own.nbytes
    assert sent == (0 if job.rank == 1 else nbytes)
