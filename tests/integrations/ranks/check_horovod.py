"""Programs of Horovod, compared with one process that has the data of all ranks."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hpcstrat as hs
import hpcstrat.integrations.horovod.torch as hvd
from tests.mpi.ranks.outcomes import assert_usable, exchanged, outcome

# Torch gives this warning for sparse tensors that torch itself has made.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

NUMBERS = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]
HALVES = [torch.bfloat16, torch.float16]
MOVED = [*NUMBERS, *HALVES, torch.bool, torch.complex64, torch.int16]


@pytest.fixture(scope="module", autouse=True)
def horovod() -> Iterator[None]:
    """Initialize like a program of Horovod."""
    torch.set_num_threads(1)
    hvd.init()
    yield
    hvd.shutdown()


def _tensor(rank: int, shape: Any = (5,), dtype: Any = torch.float32) -> Any:
    """Return a rank's tensor of small numbers; every rank can make it."""
    generator = torch.Generator().manual_seed(rank + 1)
    numbers = torch.randint(1, 7, tuple(shape), generator=generator)
    return (numbers % 2 == 0) if dtype is torch.bool else numbers.to(dtype)


def _all(shape: Any = (5,), dtype: Any = torch.float32) -> Any:
    """Return the tensors of all ranks, stacked."""
    return torch.stack([_tensor(r, shape, dtype) for r in range(hvd.size())])


def _own(*args: Any) -> Any:
    return _tensor(hvd.rank(), *args)


# Ranks, sizes and features that the program can ask for.


def test_ranks_are_those_of_the_job(strategy: Any, job: Any) -> None:
    topology = strategy.topology
    assert hvd.is_initialized()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (job.rank, job.size)
    assert (hvd.local_rank(), hvd.local_size()) == (
        topology.worker_comm.rank,
        topology.worker_comm.size,
    )
    places = topology.worker_id, topology.num_workers
    assert (hvd.cross_rank(), hvd.cross_size()) == places
    assert hvd.is_homogeneous()
    assert hvd.mpi_enabled()
    assert hvd.mpi_built()
    assert hvd.mpi_threads_supported() in (False, True)
    for built in ("gloo", "nccl", "ddl", "ccl", "cuda", "rocm"):
        assert not getattr(hvd, f"{built}_built")()
    assert not hvd.gloo_enabled()
    everyone = hvd.ProcessSet()
    assert (everyone.rank(), everyone.size()) == (job.rank, job.size)
    assert everyone.included()


def test_it_ends_and_begins_again(job: Any) -> None:
    left = hvd.allreduce_async(torch.ones(1), name="left")
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert "use hvd.init()" in str(outcome(hvd.rank))
    hvd.shutdown()
    hvd.init(comm=job)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == job.size
    assert "'allreduce.left'" in str(outcome(hvd.synchronize, left))


def test_what_is_not_there_raises_with_advice() -> None:
    own, size = _own(), hvd.size()
    rule = torch.optim.LBFGS([torch.zeros(2, requires_grad=True)])
    for call, advice in [
        (hvd.join, "GlobalBatchSampler"),
        (lambda: hvd.elastic.run(print), "hpcstrat.elastic.run"),
        (lambda: hvd.elastic.TorchState(batch=0), "hvd.elastic.TorchState"),
        (lambda: hvd.add_process_set([0]), "comm="),
        (lambda: hvd.remove_process_set(hvd.global_process_set), "comm="),
        (lambda: hvd.ProcessSet([0]), "comm="),
        (lambda: hvd.init(process_sets="dynamic"), "comm="),
        (lambda: hvd.init(comm=[0]), "mpi4py"),
        (lambda: hvd.allreduce(own, process_set=3), "comm="),
        (lambda: hvd.allreduce(own, op=hvd.Adasum), "Average"),
        (lambda: hvd.start_timeline("file"), "HPCSTRAT_TIMELINE"),
        (lambda: hvd.allreduce(own, op=hvd.Sum, average=True), "supersedes"),
        (lambda: hvd.allreduce(own.to_sparse()), "to_dense"),
        (lambda: hvd.allgather(torch.tensor(1)), "reshape"),
        (lambda: hvd.reducescatter(torch.tensor(1)), "reshape"),
        (lambda: hvd.broadcast(own, size), "root_rank from 0 to"),
        (lambda: hvd.alltoall(own, [9] * size), "of 5 rows at most"),
        (lambda: hvd.alltoall(own, torch.ones(size)), "integers"),
        (lambda: hvd.alltoall(own, [1] * (size + 1)), "integers"),
        (lambda: hvd.broadcast_parameters(3, 0), "invalid params"),
        (lambda: hvd.broadcast_optimizer_state(rule, 0), "LBFGS"),
    ]:
        error = outcome(call)
        assert isinstance(error, (NotImplementedError, ValueError)), error
        assert advice in str(error)
    hvd.stop_timeline()
    assert not hasattr(hvd.elastic, "__wrapped__")


# Exchanges of tensors.


REDUCED = {
    hvd.Sum: lambda whole: whole.sum(0),
    hvd.Min: lambda whole: whole.amin(0),
    hvd.Max: lambda whole: whole.amax(0),
    hvd.Product: lambda whole: whole.prod(0),
    hvd.Average: lambda whole: whole.sum(0) / len(whole),
}
# By default, sums and means of all types, and other operations of two types.
TYPES = {op: [NUMBERS[0], HALVES[0]] for op in (hvd.Min, hvd.Max, hvd.Product)}


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(
            op, dtype, marks=() if dtype in TYPES.get(op, [dtype]) else pytest.mark.full
        )
        for op in REDUCED
        for dtype in (*NUMBERS, *HALVES)
    ],
    ids=str,
)
def test_allreduce_in_all_its_forms(op: Any, dtype: Any) -> None:
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    for shape in [(), (0,), (2, 3), (1001,)]:
        own = _own(shape, dtype)
        # Integer averages are rounded towards zero; uint8 products wrap on both sides.
        expected = REDUCED[op](_all(shape, dtype).to(wide)).to(dtype)
        kept, placed = own.clone(), own.clone()
        results = [
            hvd.allreduce(own, op=op),
            hvd.synchronize(hvd.allreduce_async(own, op=op)),
            hvd.allreduce_(own.clone(), op=op),
            hvd.grouped_allreduce([own, own], op=op)[1],
            hvd.synchronize(hvd.grouped_allreduce_async([own, own], op=op))[0],
            hvd.grouped_allreduce_([own.clone(), own.clone()], op=op)[1],
        ]
        handle = hvd.allreduce_async_(placed, op=op)
        assert hvd.synchronize(handle) is placed
        group = [own.clone(), own.clone()]
        hvd.synchronize(hvd.grouped_allreduce_async_(group, op=op))
        for result in (*results, placed, *group):
            torch.testing.assert_close(result, expected)
        assert torch.equal(own, kept)


def test_allreduce_of_truths_columns_and_complex_numbers() -> None:
    truths = hvd.allreduce(_own((9,), torch.bool), op=hvd.Sum)
    assert torch.equal(truths, _all((9,), torch.bool).any(0))
    columns = _own((3, 4)).t()
    hvd.allreduce_(columns, op=hvd.Max)
    assert torch.equal(columns, _all((3, 4)).amax(0).t())
    numbers = hvd.allreduce(_own((3,), torch.complex64) * 1j)
    torch.testing.assert_close(numbers, _all((3,), torch.complex64).mean(0) * 1j)


def test_old_words_and_factors() -> None:
    whole = _all().double()
    assert torch.equal(hvd.allreduce(_own(), average=False).double(), whole.sum(0))
    torch.testing.assert_close(hvd.allreduce(_own(), True).double(), whole.mean(0))
    result = hvd.allreduce(_own(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3)
    torch.testing.assert_close(result.double(), whole.sum(0) * 1.5)
    # Integers are multiplied by the factor in float64, then truncated.
    counts = hvd.allreduce(_own((5,), torch.int32), op=hvd.Sum, prescale_factor=0.5)
    assert torch.equal(counts, _all((5,), torch.int32).div(2).int().sum(0).int())
    half = hvd.allreduce(_own((5,), torch.half), op=hvd.Sum, postscale_factor=0.5)
    assert torch.equal(half, (whole.sum(0) / 2).half())
    packed = hvd.allreduce(_own() / 3, compression=hvd.Compression.fp16)
    assert packed.dtype is torch.float32
    torch.testing.assert_close(packed.double(), whole.mean(0) / 3, rtol=2e-3, atol=0)
    assert hvd.Compression.none.compress(packed)[0] is packed
    integers = hvd.Compression.fp16.compress(torch.ones(2, dtype=torch.int8))
    assert integers[0].dtype is torch.int8


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_tensors_are_moved_as_they_are(dtype: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    for shape in [(), (0,), (3,), (2, 3), (4, 0)]:
        for root in range(size):
            own, expected = _own(shape, dtype), _tensor(root, shape, dtype)
            assert torch.equal(hvd.broadcast(own, root), expected)
            assert torch.equal(own, _own(shape, dtype))
            handle = hvd.broadcast_async(own, root)
            assert hvd.broadcast_(own, root) is own
            placed = hvd.synchronize(hvd.broadcast_async_(own, root))
            for result in (own, placed, hvd.synchronize(handle)):
                assert torch.equal(result, expected)
    for tail in [(), (2,), (0,), (2, 3)]:
        every = [_tensor(r, (r, *tail), dtype) for r in range(size)]
        whole = torch.cat(every)
        own = every[rank]
        assert torch.equal(hvd.allgather(own), whole)
        assert torch.equal(hvd.synchronize(hvd.allgather_async(own)), whole)
        both = hvd.grouped_allgather([own, own.flip(0)])
        assert torch.equal(both[0], whole)
        assert torch.equal(both[1], torch.cat([part.flip(0) for part in every]))
        handle = hvd.grouped_allgather_async([own])
        assert torch.equal(hvd.synchronize(handle)[0], whole)
        rows = [_tensor(r, (size * (r + 1) + 1, *tail), dtype) for r in range(size)]
        # Rank k gets one row more than rank k - 1.
        counts = [list(range(r, r + size)) for r in range(size)]
        counts = [[min(n, 1) for n in line] for line in counts]
        expected = torch.cat(
            [
                rows[r].split([*counts[r], len(rows[r]) - sum(counts[r])])[rank]
                for r in range(size)
            ]
        )
        splits = torch.tensor(counts[rank], dtype=torch.int32)
        came, lengths = hvd.alltoall(rows[rank], splits)
        assert torch.equal(came, expected)
        assert lengths.tolist() == [line[rank] for line in counts]
        assert lengths.dtype is torch.int32
        even = hvd.alltoall(rows[rank][:-1])
        assert torch.equal(
            even, torch.cat([rows[r][:-1].chunk(size)[rank] for r in range(size)])
        )
        handle = hvd.alltoall_async(rows[rank], counts[rank])
        assert torch.equal(hvd.synchronize(handle)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16], ids=str)
def test_reducescatter_leaves_each_rank_its_rows(dtype: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows, op in itertools.product([0, 1, size, 2 * size + 1], REDUCED):
        whole, own = _all((rows, 2), dtype), _own((rows, 2), dtype)
        wide = whole.double() if dtype.is_floating_point else whole.long()
        expected = REDUCED[op](wide).to(dtype).tensor_split(size)[rank]
        handle = hvd.reducescatter_async(own, op=op)
        group = hvd.grouped_reducescatter_async([own, own], op=op)
        for result in (
            hvd.reducescatter(own, op=op),
            hvd.synchronize(handle),
            hvd.grouped_reducescatter([own, own], op=op)[1],
            hvd.synchronize(group)[0],
        ):
            torch.testing.assert_close(result, expected)
    doubled = hvd.reducescatter(
        own, op=hvd.Sum, prescale_factor=4, postscale_factor=0.5
    )
    torch.testing.assert_close(doubled, hvd.reducescatter(own, op=hvd.Sum) * 2)


def test_sparse_tensors_and_objects(job: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    indices = torch.tensor([[rank, rank + 1]])
    own = torch.sparse_coo_tensor(indices, torch.ones(2, 3), (size + 1, 3))
    for op, share in [(hvd.Sum, 1), (hvd.Average, 1 / size)]:
        total = hvd.sparse_allreduce_async(own, name="rows", op=op)()
        expected = torch.full((size + 1, 3), 2.0)
        expected[0] = expected[-1] = 1
        torch.testing.assert_close(total.to_dense(), expected * share)
    for root in range(size):
        got = hvd.broadcast_object({"rank": rank}, root, name=f"object {root}")
        assert got == {"rank": root}
    assert hvd.allgather_object((rank, "x")) == [(r, "x") for r in range(size)]


def test_a_barrier_ends_when_all_have_come(folder: Path) -> None:
    for number in range(3):
        (folder / f"{number}-{hvd.rank()}").touch()
        hvd.barrier()
        assert len([*folder.glob(f"{number}-*")]) == hvd.size()


# Gradients through exchanges.


def test_gradients_are_those_of_horovod() -> None:
    size, rank = hvd.size(), hvd.rank()

    def gradient_of(call: Any, rows: int = 4) -> Any:
        """Return the gradient if each element of the result has the weight rank + 1."""
        tensor = _tensor(rank, (rows, 2), torch.float64).requires_grad_()
        result = call(tensor)
        assert result.requires_grad
        result.backward(torch.full_like(result, rank + 1.0))
        return tensor.grad

    mean = sum(range(1, size + 1)) / size
    ones = torch.ones(4, 2, dtype=torch.float64)
    rows = rank + 1
    for call, expected in [
        (hvd.allreduce, ones * mean),
        (lambda t: hvd.allreduce(t, op=hvd.Sum), ones * mean * size),
        (lambda t: hvd.grouped_allreduce([t, t])[1], ones * mean),
        (lambda t: hvd.broadcast(t, size - 1), ones * mean * (rank == size - 1)),
        (
            lambda t: hvd.allreduce(t, op=hvd.Sum, postscale_factor=2),
            ones * mean * size * 2,
        ),
    ]:
        torch.testing.assert_close(gradient_of(call), expected)
    for call in (hvd.allgather, lambda t: hvd.grouped_allgather([t])[0]):
        torch.testing.assert_close(
            gradient_of(call, rows), ones[:1].expand(rows, 2) * mean
        )
    # Each row's gradient comes from the rank it was sent to; unsent rows have zero.
    back = torch.arange(1.0, size + 1, dtype=torch.float64).repeat_interleave(2)
    expected = back[:, None].expand(-1, 2)
    torch.testing.assert_close(gradient_of(hvd.alltoall, 2 * size), expected)
    got = gradient_of(lambda t: hvd.alltoall(t, [2] * size)[0], 2 * size + 1)
    assert torch.equal(got, torch.cat([expected, torch.zeros(1, 2)]))
    for op, factor in [(hvd.Sum, size), (hvd.Average, 1)]:
        got = gradient_of(lambda t, op=op: hvd.reducescatter(t, op=op), 2 * size)
        torch.testing.assert_close(got, expected * factor)
    twice = _own((3,), torch.float64).requires_grad_()
    [once] = torch.autograd.grad(
        hvd.allreduce(twice**3).sum(), twice, create_graph=True
    )
    once.sum().backward()
    torch.testing.assert_close(twice.grad, 6 * twice.detach())


# Names of calls.


KINDS = {
    "sum": lambda t, name: hvd.allreduce_async(t, name=name, op=hvd.Sum),
    "max": lambda t, name: hvd.allreduce_async(t, name=name, op=hvd.Max),
    "gather": lambda t, name: hvd.allgather_async(t, name=name),
}
PREFIXES = {"sum": "allreduce", "max": "allreduce", "gather": "allgather"}


class _Alone:
    """A model of the programs of all ranks, which runs them in one process."""

    def __init__(self, programs: list[list[tuple[str, int, int]]]) -> None:
        self.programs = programs
        self.size = len(programs)
        self.places = [0] * self.size
        self.pending: list[dict[int, tuple[int, int]]] = [{} for _ in programs]
        self.latest: list[dict[int, int]] = [{} for _ in programs]
        self.ended: list[dict[int, Any]] = [{} for _ in programs]
        self.results: list[list[Any]] = [[] for _ in programs]
        # A name after all other names: a rank's end, which waits until all ranks end.
        self.end = -1

    def run(self) -> list[list[Any]]:
        while True:
            awaited = [self._until_it_waits(rank) for rank in range(self.size)]
            common = set.intersection(*(set(one) for one in self.pending))
            for name in common:
                shapes = {one[name][0] for one in self.pending}
                sums = [one[name][0] * (r + 1) for r, one in enumerate(self.pending)]
                self._finish(name, sums if len(shapes) == 1 else "mismatch")
            if self.end in common:
                return self.results
            if not common & set(awaited):
                for name in set(awaited):
                    self._finish(name, "deadlock")

    def _finish(self, name: int, result: Any) -> None:
        for rank in range(self.size):
            if name in self.pending[rank]:
                _, handle = self.pending[rank].pop(name)
                self.ended[rank][handle] = result

    def _until_it_waits(self, rank: int) -> int:
        program = self.programs[rank]
        while self.places[rank] < len(program):
            kind, name, shape = program[self.places[rank]]
            if kind == "submit":
                if name in self.pending[rank]:
                    self.results[rank].append("duplicate")
                else:
                    self.pending[rank][name] = shape, self.places[rank]
                    self.latest[rank][name] = self.places[rank]
            elif (handle := self.latest[rank].get(name)) is not None:
                if handle not in self.ended[rank]:
                    return name
                self.results[rank].append(self.ended[rank][handle])
            self.places[rank] += 1
        if self.end not in self.pending[rank]:
            self.pending[rank][self.end] = 1, -1
        return self.end


def _run(number: int, program: list[tuple[str, int, int]]) -> list[Any]:
    """Run a rank's program; return results in the form of `_Alone`, with tensors."""
    latest: dict[int, Any] = {}
    results: list[Any] = []
    for kind, name, length in program:
        what = [*KINDS][name % len(KINDS)]
        if kind == "submit":
            own = torch.full((2, length), float(length * (hvd.rank() + 1)))
            try:
                latest[name] = what, KINDS[what](own, f"{number}-{name}")
            except ValueError as error:
                refused = "with the same name as another tensor" in str(error)
                results.append("duplicate" if refused else error)
        elif name in latest:
            what, handle = latest[name]
            try:
                got = hvd.synchronize(handle)
            except hvd.HorovodInternalError as error:
                text = str(error)
                mismatch = "the same call on all ranks" in text
                named = f"'{PREFIXES[what]}.{number}-{name}'" in text
                results.append(named and ("mismatch" if mismatch else "deadlock"))
            else:
                results.append((what, got))
    while isinstance(error := outcome(hvd.barrier), hvd.HorovodInternalError):
        assert "found that all wait" in str(error), error
    return results


_numbers = itertools.count()
_STEPS = st.tuples(
    st.sampled_from(["submit", "submit", "wait"]),
    st.integers(0, 4),
    st.sampled_from([3, 3, 3, 3, 2]),
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_names_come_in_any_order(job: Any, data: Any) -> None:
    programs = data.draw(
        st.lists(st.lists(_STEPS, max_size=12), min_size=job.size, max_size=job.size)
    )
    told = _Alone(programs).run()[job.rank]
    # Calls of earlier examples that were not awaited still exist.
    got = _run(next(_numbers), programs[job.rank])

    def check() -> None:
        assert len(got) == len(told), (got, told)
        for own, expected in zip(got, told, strict=True):
            if isinstance(expected, str):
                assert own == expected
                continue
            what, tensor = own
            numbers = np.array(expected, float)
            if what == "gather":
                assert tensor.tolist() == [
                    [n] * tensor.shape[1] for n in numbers.repeat(2)
                ]
            else:
                total = numbers.sum() if what == "sum" else numbers.max()
                assert (tensor == total).all()

    exchanged(job, check)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_ranks_that_submit_the_same_in_other_orders(job: Any, seed: int) -> None:
    """Ranks may submit calls, and wait for them, in different orders."""
    count = 7
    own = np.random.default_rng([seed, job.rank])
    handles = {}
    for name in own.permutation(count).tolist():
        values = torch.full((name + 1,), float(10 * name + job.rank))
        handles[name] = hvd.allreduce_async(values, name=f"{seed} {name}", op=hvd.Sum)
    ranks = sum(range(job.size))
    for name in own.permutation(count).tolist():
        assert (hvd.synchronize(handles[name]) == 10 * name * job.size + ranks).all()


def test_a_name_twice_is_refused_where_it_is(job: Any) -> None:
    last = job.size - 1
    handle = hvd.allreduce_async(torch.ones(1), name="one", op=hvd.Sum)
    if job.rank == last:
        with pytest.raises(ValueError, match="use a different tensor name"):
            hvd.allreduce_async(torch.ones(1), name="one")
        # A call of another kind with the same name is a different call.
        other = hvd.allgather_async(torch.ones(1), name="one")
    assert hvd.synchronize(handle) == job.size
    if job.rank != last:
        other = hvd.allgather_async(torch.ones(1), name="one")
    assert len(hvd.synchronize(other)) == job.size


def test_calls_that_differ_are_named_on_all_ranks(strategy: Any, job: Any) -> None:
    last = job.rank == job.size - 1
    for call, words in [
        (lambda: hvd.allreduce(torch.ones(2 + last), name="x"), "float32[2] on rank"),
        (lambda: hvd.allreduce(_own((1,), [torch.int32, torch.half][last])), "float16"),
        (lambda: hvd.allreduce(_own(), op=[hvd.Sum, hvd.Max][last]), "Max of"),
        (lambda: hvd.allreduce(_own(), prescale_factor=1 + last), "times 2"),
        (lambda: hvd.allgather(torch.ones(1, 2 + last)), "float32[:, 3]"),
        (lambda: hvd.broadcast(_own(), int(last)), "from rank 1"),
    ]:
        error = outcome(call)
        if job.size > 1:
            assert isinstance(error, hs.CollectiveError)
            assert words in str(error), error
    assert_usable(strategy, job)


def test_ranks_that_wait_for_one_another_are_named(strategy: Any, job: Any) -> None:
    name = "first" if job.rank == 0 else "second"
    both = hvd.allreduce_async(torch.ones(1), name="both", op=hvd.Sum)
    error = outcome(hvd.allreduce, torch.ones(1), name=name)
    if job.size > 1:
        assert isinstance(error, hvd.HorovodInternalError)
        assert "rank 0 for 'allreduce.first', which rank" in str(error)
        assert "for 'allreduce.second', which rank 0 did not submit" in str(error)
    assert hvd.poll(both)
    assert hvd.synchronize(both) == job.size
    assert hvd.allreduce(torch.ones(1), name=name if error is None else "second") == 1
    assert_usable(strategy, job)


def test_a_program_that_only_polls_comes_to_its_end(job: Any) -> None:
    handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    looks = [hvd.poll(handle)]
    if job.rank == 0:
        while not looks[-1]:
            looks.append(hvd.poll(handle))
    assert hvd.synchronize(handle) == job.size
    assert not looks[0]


# Models and optimizers.


def _net(seed: int, *, bias: bool = True) -> Any:
    torch.manual_seed(seed)
    layers = nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def _rows(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def _assert_equal(module: Any, alone: Any, **limits: float) -> None:
    limits = limits or {"rtol": 1e-12, "atol": 1e-12}
    for own, whole in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, whole, **limits)


def test_the_usual_program_is_that_of_one_process(strategy: Any) -> None:
    model, alone = _net(hvd.rank()), _net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The schedule is on the old optimizer, which shares its options, but no steps,
    # with the new one.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters()
    )
    assert isinstance(optimizer, torch.optim.SGD)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    its = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.lr_scheduler.StepLR(its, 2)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(_rows(step, hvd.rank())).square().mean()
        loss.backward()
        its.zero_grad()
        rows = torch.cat([_rows(step, r) for r in range(hvd.size())])
        total = alone(rows).square().mean()
        total.backward()
        if step % 2:
            optimizer.synchronize()
            for net in (model, alone):
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        its.step()
        with warnings.catch_warnings():
            # PyTorch warns because the schedule's optimizer makes no steps.
            warnings.simplefilter("ignore")
            schedule.step()
        other.step()
        average = hvd.allreduce(loss.detach(), name="loss")
        torch.testing.assert_close(average, total.detach())
        _assert_equal(model, alone)
    strategy.check_equal(model.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"backward_passes_per_step": 2},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"num_groups": 2},
        {"compression": hvd.Compression.fp16},
        {"sparse_as_dense": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_optimizer(options: dict[str, Any]) -> None:
    model, alone = _net(0), _net(0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), **options
    )
    its = torch.optim.Adam(alone.parameters())
    passes = options.get("backward_passes_per_step", 1)
    share = 1 if options.get("op") is hvd.Sum else hvd.size()
    for step in range(2):
        for number in range(passes):
            model(_rows(step + 9 * number, hvd.rank())).square().mean().backward()
            for rank in range(hvd.size()):
                x = _rows(step + 9 * number, rank)
                (alone(x).square().mean() / share).backward()
        for one in (optimizer, its):
            one.step()
            one.zero_grad()
    halved = "compression" in options
    _assert_equal(model, alone, **({"rtol": 0, "atol": 2e-3} if halved else {}))


def test_a_backward_too_many_and_zero_grad_in_between_are_refused() -> None:
    model = _net(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    optimizer.set_backward_passes_per_step(1)
    model(_rows(0, 0)).sum().backward()
    with pytest.raises(AssertionError, match="race condition"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        model(_rows(0, 0)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_names_of_parameters_are_checked() -> None:
    model = _net(0)
    optimizer, named = (
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
    )
    for pairs, words in [
        (model.parameters(), "sequence of tuples"),
        ([("a", p) for p in model.parameters()], "duplicates: a"),
        ([*named][:1], "one or more model parameters"),
    ]:
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(optimizer, named_parameters=pairs)
    for options in (
        {"backward_passes_per_step": 0},
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
    ):
        with pytest.raises(ValueError, match=r"backward_passes|predivide"):
            hvd.DistributedOptimizer(optimizer, **options)
    with pytest.raises(NotImplementedError, match="Adasum"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)


def test_parameters_that_only_some_ranks_use() -> None:
    """A frozen parameter is ignored, and is included again after it is unfrozen."""
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(size + 2))
    alone = copy.deepcopy(layers)
    layers[size].requires_grad_(False)
    alone[size].requires_grad_(False)
    # The last parameter is added later.
    optimizers = [
        torch.optim.SGD(one[: size + 1].parameters(), 0.1) for one in (layers, alone)
    ]
    optimizers[0] = hvd.DistributedOptimizer(optimizers[0])
    for step in range(3):
        x = _rows(step, 0)
        losses = layers[rank](x).sum() + layers[size](x).sum() + layers[-1](x).sum()
        losses.backward()
        whole = sum(alone[r](x).sum() for r in range(size)) / size
        (whole + alone[size](x).sum() + alone[-1](x).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _assert_equal(layers, alone)
        for one, optimizer in zip((layers, alone), optimizers, strict=True):
            one[size].requires_grad_(True)
            if step == 0:
                one[-1].zero_grad()
                optimizer.add_param_group({"params": list(one[-1].parameters())})


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients(dense: bool) -> None:
    size = hvd.size()
    torch.manual_seed(0)
    table, alone = (nn.Embedding(9, 2, sparse=True).double() for _ in range(2))
    alone.load_state_dict(hvd.broadcast_object(table.state_dict()))
    hvd.broadcast_parameters([*table.named_parameters()], 0)
    optimizer = torch.optim.SparseAdam([*table.parameters()], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=dense)
    its = torch.optim.SparseAdam([*alone.parameters()], lr=0.1)
    for step in range(2):
        picks = [torch.tensor([r + step, r + step + 1, 8]) for r in range(size)]
        table(picks[hvd.rank()]).square().sum().backward()
        (sum(alone(pick).square().sum() for pick in picks) / size).backward()
        for one in (optimizer, its):
            one.step()
            one.zero_grad()
    _assert_equal(table, alone)


def test_two_optimizers_step_in_any_order(strategy: Any) -> None:
    nets = [_net(0), _net(1)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.1),
            named_parameters=[(f"{i}.{n}", p) for n, p in net.named_parameters()],
        )
        for i, net in enumerate(nets)
    ]
    for net in nets:
        net(_rows(0, hvd.rank())).sum().backward()
    for optimizer in optimizers if hvd.rank() else optimizers[::-1]:
        optimizer.step()
    strategy.check_equal([net.state_dict() for net in nets])


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_state_comes_from_the_root(kind: str, strategy: Any) -> None:
    root = hvd.size() - 1
    model = _net(0)
    options = {"lr": 0.1 * (hvd.rank() + 1), "weight_decay": 0.1}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    if hvd.rank() == root:
        model(_rows(0, 0)).sum().backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_parameters(list(model.parameters()), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * hvd.size())
    states = [optimizer.state[p] for p in model.parameters()]
    assert all(states) == (kind != "SGD")
    strategy.check_equal([model.state_dict(), states])


def test_batches_are_normalized_over_all_ranks() -> None:
    size, rank = hvd.size(), hvd.rank()
    layer, alone = hvd.SyncBatchNorm(4).double(), nn.BatchNorm1d(4).double()
    whole = torch.cat([_rows(0, r) for r in range(size)]).requires_grad_()
    own = _rows(0, rank).requires_grad_()
    out, expected = layer(own), alone(whole)
    torch.testing.assert_close(out, expected[3 * rank : 3 * rank + 3])
    torch.testing.assert_close(layer.running_var, alone.running_var)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[3 * rank : 3 * rank + 3])
    summed = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(summed, alone.weight.grad)
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(copied(own), alone(whole)[3 * rank : 3 * rank + 3])


@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
def test_gradients_of_a_closure_are_combined(name: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    rows = torch.randn(3 * size, 2, generator=torch.Generator().manual_seed(2)).double()
    targets = rows @ torch.tensor([1.0, -2.0]).double()
    found = []
    for own in (slice(3 * rank, 3 * rank + 3), slice(None)):
        layer = nn.Linear(2, 1).double()
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        options = {"line_search_fn": "strong_wolfe"} if name == "LBFGS" else {}
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1, **options)
        if own != slice(None):
            optimizer = hvd.DistributedOptimizer(optimizer, layer.named_parameters())

        def closure(layer: Any = layer, own: Any = own, rule: Any = optimizer) -> Any:
            rule.zero_grad()
            loss = (layer(rows[own]).squeeze(1) - targets[own]).square().mean()
            loss.backward()
            return loss

        losses = [
            float(torch.as_tensor(optimizer.step(closure)).detach()) for _ in range(3)
        ]
        found.append([torch.tensor(losses).double(), *layer.parameters()])
    for distributed, alone in zip(*found, strict=True):
        torch.testing.assert_close(distributed, alone, rtol=1e-9, atol=1e-9)
    everywhere = hvd.allgather_object([p.tolist() for p in found[0]])
    assert everywhere == everywhere[:1] * size


def test_a_closure_needs_the_gradients_to_be_combined() -> None:
    layer = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1))
    with (
        optimizer.skip_synchronize(),
        pytest.raises(ValueError, match="outside of skip_synchronize"),
    ):
        optimizer.step(lambda: None)
