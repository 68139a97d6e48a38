"""Copies of mirrored variables that differ are found and named; equal copies never."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.safety.divergence import divergence
from hpcstrat.safety.divergence.first_difference import octets
from tests.mpi.ranks.differing import error_within, named_ranks, round_length, step
from tests.mpi.ranks.effort import examples, in_step
from tests.mpi.ranks.outcomes import assert_usable, exchanged, outcome
from tests.mpi.ranks.sums import DTYPES

# Two ranks have no majority. Uneven workers compare copies by memory and by messages.
pytestmark = pytest.mark.rule


SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 3, 4), (3000,), (70, 90)]


@pytest.fixture
def watched(make_strategy: Any, job: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes strategies with settings; close them at the end."""
    made: list[Any] = []

    def make(on_error: str = "abort", **chosen: Any) -> Any:
        options = {"comm": job, "settings": hs.Settings(**chosen)}
        made.append(make_strategy(on_error=on_error, **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


@pytest.fixture
def several(job: Any) -> None:
    """Skip a test that has no meaning for a single replica."""
    if job.size == 1:
        pytest.skip("one copy does not differ")


def flip(variable: Any, place: int, bit: int) -> tuple[int, ...]:
    """Flip one bit of an element's value, not its padding; return its index."""
    array = variable.component
    rows = octets(array)
    per_element = len(rows) // array.size
    row = rows[place * per_element + bit % per_element]
    row[bit // 8 % len(row)] ^= 1 << bit % 8
    return tuple(int(i) for i in np.unravel_index(place, array.shape))


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 10**6),
    before=st.integers(0, 3),
)
@settings(in_step, max_examples=examples(20))
def _a_flipped_bit_is_found(
    strategy: Any, job: Any, *, kinds: Any, seed: int, before: int
) -> None:
    # Free variables of earlier examples on all ranks, so that comparisons agree.
    gc.collect()
    strategy.check_divergence()
    drawn = np.random.default_rng(seed)
    with strategy.scope():
        variables = [
            hs.Variable(drawn.integers(0, 2, shape).astype(dtype), name=f"v{i}")
            for i, (dtype, shape) in enumerate(kinds)
        ]
    errors = [error_within(strategy, before)]
    filled = [v for v in variables if v.size]
    if not filled:
        return
    target = filled[drawn.integers(len(filled))]
    place, bit = int(drawn.integers(target.size)), int(drawn.integers(512))
    faulty = int(drawn.integers(job.size))
    right = target.numpy()
    element: Any = np.unravel_index(place, target.shape)
    if job.rank == faulty:
        element = flip(target, place, bit)
    errors.append(error_within(strategy, round_length(strategy)))
    # After the repair of the copy, the program continues.
    target.assign(right)
    errors.append(error_within(strategy, 2 * round_length(strategy) + 1))

    def check() -> None:
        start, found, after = errors
        assert start is None
        assert after is None
        assert isinstance(found, hs.DivergenceError), repr(found)
        assert found.variable.partition(" ")[0] == target.name
        assert found.element == tuple(int(i) for i in element)
        assert found.ranks == named_ranks(faulty, job.size)
        assert f"variable '{target.name}" in str(found)

    exchanged(job, check)


def test_a_flipped_bit_is_found_in_a_round(
    watched: Any, job: Any, several: None
) -> None:
    _a_flipped_bit_is_found(watched(), job)


def test_values_and_number_of_others_are_told(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        weights = hs.Variable(np.zeros((2, 3)), name="weights")
        bias = hs.Variable(np.zeros(3), name="bias")
    odd = job.size - 1
    if job.rank == odd:
        weights.component[1, 2] = 4.5
        bias.component[0] = 1
    error = outcome(strategy.run, step)
    assert isinstance(error, hs.DivergenceError)
    assert isinstance(error, hs.CollectiveError)
    text = str(error)
    assert f"4.5 on replica {odd}, 0.0 on replica 0, and that 1 more" in text
    assert "in element (1, 2)" in text
    assert set(job.allgather(text)) == {text}


def test_most_replicas_are_right(watched: Any, job: Any) -> None:
    if job.size < 3:
        pytest.skip("takes three to have a majority")
    strategy = watched()
    with strategy.scope():
        x = hs.Variable(1.0, name="x")
    if job.rank == 0:
        x.component[...] = 2
    error = outcome(strategy.run, step)
    assert error.ranks == (0,)
    assert "2.0 on replica 0, 1.0 on replica 1" in str(error)


def test_numbers_that_look_the_same_are_told_apart(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        x = hs.Variable(np.full(3, np.nan, np.float32), name="x")
    if job.rank == 1:
        x.component.view(np.int32)[2] ^= 1
    error = outcome(strategy.run, step)
    assert "nan (0x7fc00001) on replica 1, nan (0x7fc00000) on" in str(error)


def test_variables_of_one_name_are_numbered(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        variables = [hs.Variable(1.0, name="x") for _ in range(3)]
    if job.rank == 0:
        variables[1].component[...] = 2
    assert "'x (number 2 of 3)'" in str(outcome(strategy.run, step))


def test_padding_of_long_doubles_may_differ(
    watched: Any, job: Any, several: None
) -> None:
    if np.finfo(np.longdouble).nmant != 63:
        pytest.skip("long doubles have no padding here")
    strategy = watched()
    with strategy.scope():
        variables = [hs.Variable(np.ones(3, t), name=t) for t in "gG"]
    for variable in variables:
        rows = variable.component.view(np.longdouble).view(np.uint8).reshape(-1, 16)
        rows[:, 10:] = job.rank + 1
    assert error_within(strategy, 3) is None
    strategy.check_divergence()


def test_runs_without_calls_are_checked_by_the_next_call(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        x = hs.Variable(1.0, name="x")
        y = hs.Variable(0.0, name="y")
    x.assign(float(job.rank))
    strategy.run(lambda: None)
    y.assign(1.0)
    strategy.run(lambda: None)
    error = outcome(strategy.reduce, "sum", 1.0)
    assert isinstance(error, hs.DivergenceError)
    assert error.variable == "x"


def test_copies_that_are_equal_again_are_no_error(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        x = hs.Variable(1.0, name="x")
    x.assign(float(job.rank))
    strategy.run(lambda: None)
    x.assign(3.0)
    assert_usable(strategy, job)
    assert error_within(strategy, 3) is None


def test_copies_that_stay_different_are_told_again(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        x = hs.Variable(float(0), name="x")
    x.assign(float(job.rank))
    for _ in range(3):
        assert isinstance(outcome(strategy.run, step), hs.DivergenceError)
        assert strategy.reduce("sum", 1.0) == job.size


def test_differences_are_raised_out_of_run_on_all_replicas(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched("raise")
    with strategy.scope():
        x = hs.Variable(1.0, name="x")
    if job.rank == 1:
        x.component[...] = 2
    error = outcome(strategy.run, lambda: None)
    assert isinstance(error, hs.DivergenceError)
    x.component[...] = 1
    assert error_within(strategy, 3) is None


def test_steps_that_all_skip_leave_copies_equal(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched("raise")
    with strategy.scope():
        x = hs.Variable(np.zeros(4), name="x", aggregation="sum")

    def failing(number: int) -> None:
        x.assign_add(np.ones(4))
        if job.rank == number % job.size:
            raise ValueError("no")
        x.assign_add(np.ones(4))

    for number in range(6):
        assert isinstance(outcome(strategy.run, failing, (number,)), ValueError)
    strategy.check_divergence()
    assert error_within(strategy, 3) is None


def test_a_left_out_call_is_told_as_such(watched: Any, job: Any, several: None) -> None:
    strategy = watched()
    with strategy.scope():
        x = hs.Variable(1.0, name="x")
    if job.rank == 0:
        x.component[...] = 5
        strategy.run(lambda: None)
    error = outcome(strategy.reduce, "sum", 1.0)
    assert not isinstance(error, hs.DivergenceError)
    assert "(rank 0: 1 call of run, 0 of next(); rank" in str(error)
    if job.rank:
        strategy.run(lambda: None)
    # Calls and copies differ: the error of the call is raised first, the error of the
    # copies in the next round.
    error = outcome(strategy.run, lambda: strategy.collectives.barrier(str(job.rank)))
    assert isinstance(error, hs.CollectiveError)
    assert not isinstance(error, hs.DivergenceError)
    assert isinstance(error_within(strategy, 1), hs.DivergenceError)


def test_a_variable_that_is_freed_later_elsewhere_is_no_error(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        kept = hs.Variable(np.zeros(9000), name="kept")
    gc.collect()
    gc.disable()
    try:
        for turn in range(4):
            with strategy.scope():
                cycle: list[Any] = [hs.Variable(np.zeros(100), name="freed")]
            cycle.append(cycle)
            del cycle
            if job.rank == turn % job.size:
                gc.collect()
            if turn % 2:
                # In the first gather of a dtype, ranks expect other lengths, too.
                for _ in range(3):
                    strategy.run(lambda: None)
                lengths = [rank + turn for rank in range(job.size)]
                rows = strategy.gather(np.ones(lengths[job.rank], f"i{1 + turn}"), 0)
                assert rows.size == sum(lengths)
            assert error_within(strategy, 3) is None
            gc.collect()
            assert error_within(strategy, 3) is None
    finally:
        gc.enable()
    kept.component[0] = job.rank
    error = error_within(strategy, round_length(strategy))
    assert isinstance(error, hs.DivergenceError)
    assert error.variable == "kept"


def test_memory_of_freed_variables_is_given_back(watched: Any, several: None) -> None:
    strategy = watched()
    with strategy.scope():
        x = hs.Variable(np.zeros(1000), name="x")
    strategy.run(step)
    flags: list[bool] = []
    # Views of the memory would keep the memory alive.
    x._component = np.zeros(1000)
    weakref.finalize(x._component, flags.append, True)
    strategy._connection.copies._changes += 1
    strategy.run(step)
    assert not flags
    del x
    assert flags


def test_other_variables_are_not_compared(
    watched: Any, job: Any, several: None
) -> None:
    strategy = watched()
    with strategy.scope():
        own = hs.Variable(0, synchronization="on_read", aggregation="sum", name="own")
        shared = hs.Variable(1.0, name="shared")
    plain = hs.Variable(float(job.rank), name="plain")
    own.component[...] = job.rank
    # A deep copy of a variable belongs to one rank only, and is not compared.
    best = copy.deepcopy(shared)
    best.component[...] = job.rank
    assert error_within(strategy, 3) is None
    strategy.check_divergence()
    assert plain.numpy() == best.numpy() == job.rank


def test_variables_of_a_closed_strategy_are_not_compared(
    make_strategy: Any, job: Any, several: None
) -> None:
    with make_strategy() as first:
        with first.scope():
            x = hs.Variable(1.0, name="x")
        with make_strategy() as second, second.scope():
            y = hs.Variable(1.0, name="y")
        y.component[...] = job.rank
        assert error_within(first, 3) is None
        x.component[...] = job.rank
        assert isinstance(error_within(first, 1), hs.DivergenceError)


def test_off_leaves_the_check_by_hand(watched: Any, job: Any, several: None) -> None:
    strategy = watched(divergence="off")
    with strategy.scope():
        x = hs.Variable(1.0, name="x")
    x.component[...] = job.rank
    assert error_within(strategy, 5) is None
    with pytest.raises(hs.DivergenceError, match="'x'"):
        strategy.check_divergence()
    assert_usable(strategy, job)


def test_one_replica_has_nothing_to_compare(job: Any) -> None:
    strategy = hs.OneDeviceStrategy()
    strategy.check_divergence()
    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(strategy.check_divergence)


def test_check_is_met_by_all_or_refused(strategy: Any, job: Any, several: None) -> None:
    call = strategy.check_divergence if job.rank else strategy.barrier
    error = outcome(call)
    assert isinstance(error, hs.CollectiveError)
    assert "comparison of mirrored variables" in str(error)


def test_full_comparisons_see_all_bytes(watched: Any, job: Any, several: None) -> None:
    strategy = watched(divergence="full", divergence_interval=5)
    with strategy.scope():
        x = hs.Variable(np.zeros(1 << 19), name="x")
    assert error_within(strategy, 5) is None
    assert round_length(strategy) > 100
    if job.rank == 0:
        x.component[-1] = 1
    error = error_within(strategy, 5)
    assert isinstance(error, hs.DivergenceError)
    assert error.element == ((1 << 19) - 1,)


@pytest.mark.parametrize("dtype", ["e", "f", "d", "g", "F", "D"])
def test_tolerance_is_relative_to_the_variable(
    watched: Any, job: Any, several: None, dtype: str
) -> None:
    strategy = watched(
        divergence="full", divergence_interval=3, divergence_tolerance=0.01
    )
    drawn = np.random.default_rng(1)
    with strategy.scope():
        x = hs.Variable(drawn.uniform(-1, 1, 70_000).astype(dtype), name="x")
        count = hs.Variable(5, name="count")
    x.component[0] = 1
    x.component[1] = np.inf
    x.component[2] = np.nan
    right = x.numpy()
    if job.rank == 0:
        x.component[40_000:] += 0.005
    assert error_within(strategy, 7) is None
    strategy.check_divergence()
    if job.rank == 0:
        x.component[66_000] += 0.5
    error = error_within(strategy, 3)
    assert isinstance(error, hs.DivergenceError)
    assert error.element == (66_000,)
    assert error.ranks == named_ranks(0, job.size)
    x.assign(right)
    if job.rank == 0:
        x.component[2] = 0
    with pytest.raises(hs.DivergenceError, match=r"element \(2,\)"):
        strategy.check_divergence()
    x.assign(right)
    if job.rank == 0:
        count.component[...] = 6
    with pytest.raises(hs.DivergenceError, match="count"):
        strategy.check_divergence()
    assert_usable(strategy, job)


def test_checkpoints_are_saved_within_the_tolerance(
    watched: Any, job: Any, tmp_path: Path, several: None
) -> None:
    strategy = watched(divergence_tolerance=0.01)
    with strategy.scope():
        x = hs.Variable(1.0, name="x")
    x.component[...] += job.rank * 1e-3
    folder = job.bcast(str(tmp_path))
    hs.CheckpointManager(folder, x=x).save(1)
    if job.rank == 0:
        x.component[...] = 2
    with pytest.raises(hs.DivergenceError):
        hs.CheckpointManager(folder, x=x).save(2)


class _Program:
    """A program with many kinds of calls, whose copies always stay equal."""

    def __init__(self, strategy: Any, job: Any, folder: str) -> None:
        self.strategy, self.job = strategy, job
        self.drawn = np.random.default_rng(7)
        with strategy.scope():
            self.weights = hs.Variable(np.zeros((40, 30), np.float32), name="weights")
            self.table = hs.Variable(np.zeros((9, 4)), aggregation="sum", name="table")
            self.seen = hs.Variable(
                0, synchronization="on_read", aggregation="sum", name="seen"
            )
            self.optimizer = hs.optimizers.Adam(1e-3)
        self.others: list[Any] = []
        self.checkpoints = hs.CheckpointManager(
            folder, max_to_keep=1, weights=self.weights, optimizer=self.optimizer
        )
        self.step = 0

    def train(self) -> None:
        own = np.random.default_rng(self.step + 1000 * self.job.rank)
        gradient = own.standard_normal(self.weights.shape).astype(np.float32)

        def one() -> None:
            self.seen.assign_add(self.job.rank)
            self.optimizer.apply_gradients([(gradient, self.weights)])

        self.strategy.run(one)

    def scatter(self) -> None:
        rows = hs.IndexedSlices(np.ones((1, 4)), [self.job.rank % 9])
        self.strategy.run(lambda: self.table.scatter_add(rows))

    def assign(self) -> None:
        for variable in (self.table, *self.others):
            variable.assign_add(np.full(variable.shape, 0.5, variable.dtype))

    def update(self) -> None:
        self.strategy.extended.update(self.table, lambda v: v.assign(v + 1))

    def merge(self) -> None:
        def merged(strategy: Any) -> None:
            self.table.assign_sub(np.ones((9, 4)))

        self.strategy.run(lambda: hs.get_replica_context().merge_call(merged))

    def start(self) -> None:
        def one() -> None:
            handle = hs.get_replica_context().start_all_reduce("sum", np.ones(700))
            self.table.assign_add(np.ones((9, 4)) * self.job.rank)
            handle.wait()

        self.strategy.run(one)

    def started_across(self) -> None:
        handle = self.strategy.run(
            lambda: hs.get_replica_context().start_all_reduce("sum", np.ones(700))
        )
        self.table.assign(np.ones((9, 4)) * self.step)
        self.strategy.run(lambda: None)
        self.strategy.local_value(handle).wait()

    def create(self) -> None:
        with self.strategy.scope():
            shape = (int(self.drawn.integers(0, 3000)),)
            self.others.append(hs.Variable(np.ones(shape), name="other"))

    def free(self) -> None:
        if self.others:
            cycle = [self.others.pop(0)]
            if self.drawn.integers(2):
                cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
        if self.step % self.job.size == self.job.rank:
            gc.collect()

    def save(self) -> None:
        self.checkpoints.save(self.step, overwrite=True)

    def restore(self) -> None:
        self.checkpoints.restore_or_initialize()

    def nothing(self) -> None:
        self.strategy.run(lambda: None)

    def mistake(self) -> None:
        rank = self.job.rank
        if self.job.size > 1:
            error = outcome(self.strategy.reduce, "sum", np.ones(3 + (rank == 0)))
            assert isinstance(error, hs.CollectiveError)
            assert not isinstance(error, hs.DivergenceError)

    def go_on(self) -> None:
        self.step += 1
        actions = (
            *(self.train, self.train, self.scatter, self.assign, self.update),
            *(self.merge, self.start, self.started_across, self.create, self.create),
            *(self.free, self.free, self.nothing, self.mistake),
        )
        rare = (self.save, self.restore)
        action = actions[self.drawn.integers(len(actions))]
        if not self.drawn.integers(25):
            action = rare[self.drawn.integers(2)]
        action()


@pytest.mark.parametrize("on_error", ["abort", "raise"])
def test_right_programs_are_never_stopped(
    watched: Any, job: Any, tmp_path: Path, on_error: str
) -> None:
    strategy = watched(on_error)
    program = _Program(strategy, job, job.bcast(str(tmp_path)))
    for _ in range(examples(150)):
        program.go_on()
    strategy.check_divergence()
    if job.size == 1:
        return
    # The comparison still works after all these steps.
    if job.rank == 0:
        program.table.component[8, 3] += 1
    error = error_within(strategy, round_length(strategy))
    assert isinstance(error, hs.DivergenceError)
    assert (error.variable, error.element) == ("table", (8, 3))


def test_slices_take_every_byte_once(watched: Any, several: None) -> None:
    strategy = watched()
    sizes = [0, 1, 3, 5000, 1, 1, 70_000, 2, 0, 12, 300_000]
    with strategy.scope():
        variables = [hs.Variable(np.zeros(n, np.float32)) for n in sizes]
    copies = strategy._connection.copies
    assert 1 < copies.num_slices <= 1001
    for pieces, _ in copies._slices:
        for piece in pieces:
            assert piece.contiguous
            piece_bytes = np.frombuffer(piece, np.uint8)
            piece_bytes += 1
            assert 0 < len(piece_bytes) <= 1 << 20
    for variable in variables:
        assert (variable.component.view(np.uint8) == 1).all()


def test_nan_in_a_variable_is_told_once(watched: Any, job: Any, several: None) -> None:
    strategy = watched()
    with strategy.scope():
        best = hs.Variable(np.inf, trainable=False, name="best")
        weights = hs.Variable(np.zeros((10, 100), np.float32), name="weights")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hpcstrat")
    logger.addHandler(handler)
    try:
        assert error_within(strategy, 40) is None
        assert lines == []
        weights.component[3, 7] = np.nan
        assert error_within(strategy, 100) is None
    finally:
        logger.removeHandler(handler)
    assert best.numpy() == np.inf
    told = job.allgather(lines)
    assert len(told[0]) == 1
    assert "'weights' is nan in element (3, 7)" in told[0][0]
    assert not any(told[1:])


def test_long_names_and_many_variables(watched: Any, job: Any, several: None) -> None:
    strategy = watched()
    with strategy.scope():
        variables = [hs.Variable(np.zeros(5), name=f"layer{i}/w") for i in range(1200)]
    assert round_length(strategy) <= 1001
    if job.rank == 0:
        variables[777].component[4] = 1
    error = error_within(strategy, round_length(strategy))
    assert error.variable == "layer777/w"
    assert functools.reduce(lambda n, v: n + v.size, variables, 0) == 6000


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    part=st.integers(8, 100),
    where=st.integers(0, 10**6),
)
@settings(in_step, max_examples=examples(20))
def _one_part_in_turn_finds_it(
    strategy: Any, job: Any, *, sizes: list[int], part: int, where: int
) -> None:
    with strategy.scope():
        variables = {f"v{n}": hs.Variable(np.ones(s)) for n, s in enumerate(sizes)}
    turns = range(max(1, -(-8 * sum(sizes) // part)))
    place = where % max(1, sum(sizes))
    number = int(np.searchsorted(np.cumsum(sizes), place, "right"))
    index = place - sum(sizes[:number])

    def found() -> list[Any]:
        check = divergence.check_mirrored
        errors = [outcome(check, strategy, variables, turn) for turn in turns]
        return [error for error in errors if error is not None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "_LEAST_BYTES", part)
        patch.setattr(divergence, "_PARTS", 1 << 40)
        equal, errors = found(), []
        if sum(sizes):
            if strategy.replica_id == 1:
                variables[f"v{number}"].component[index] = 7.0
            errors = found()

    def check() -> None:
        assert equal == []
        # An element may belong to two parts, so that two errors are possible.
        assert not sum(sizes) or 1 <= len(errors) <= 2
        for error in errors:
            assert isinstance(error, hs.DivergenceError), repr(error)
            assert (error.variable, error.element) == (f"v{number}", (index,))

    exchanged(job, check)


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_parts_in_turn_find_what_differs_anywhere(
    watched: Callable[..., Any], job: Any, tolerance: float
) -> None:
    strategy = watched("raise", divergence="off", divergence_tolerance=tolerance)
    _one_part_in_turn_finds_it(strategy, job)
