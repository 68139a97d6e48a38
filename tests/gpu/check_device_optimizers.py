"""Optimizers, and the comparison of copies, with variables on GPUs, on any ranks.

The tests need CuPy, or its stand-in on the path.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import optimizers
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.safety.divergence import divergence
from hpcstrat.safety.divergence.gpu_copies import LAG
from tests.mpi.ranks.differing import error_within, named_ranks, round_length
from tests.mpi.ranks.outcomes import assert_same_bits, assert_usable, outcome

standin = getattr(cupy, "_standin", None)

RULES: dict[str, Any] = {
    "sgd": lambda **o: optimizers.SGD(0.05, **o),
    "nesterov": lambda **o: optimizers.SGD(0.02, 0.9, nesterov=True, **o),
    "adagrad": lambda **o: optimizers.Adagrad(0.1, 0.2, 1e-6, **o),
    "adamw": lambda **o: optimizers.AdamW(0.02, 0.1, exclude=["v1"], **o),
    "lamb": lambda **o: optimizers.LAMB(0.05, 0.1, exclude=["v0"], **o),
}
SHAPES = [(40, 30), (), (0, 3), (9001,), (3,)]


@pytest.fixture
def made(make_strategy: Any, job: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes strategies with settings; close them at the end."""
    strategies: list[Any] = []

    def make(on_error: str = "abort", **chosen: Any) -> Any:
        options = {"comm": job, "settings": hs.Settings(**chosen)}
        strategies.append(make_strategy(on_error=on_error, **options))
        return strategies[-1]

    yield make
    for strategy in strategies:
        strategy.close()


@pytest.fixture
def several(job: Any) -> None:
    """Skip a test that has no meaning for a single replica."""
    if job.size == 1:
        pytest.skip("one copy does not differ")


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Yield a list that gets this rank's log lines."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hpcstrat")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class Model:
    """Variables in host or GPU memory, with an optimizer."""

    def __init__(
        self, strategy: Any, make: Any, move: Any, shapes: Any, dtype: Any = "f"
    ) -> None:
        self.strategy, self.move, self.dtype = strategy, move, dtype
        rng = np.random.default_rng(1)
        starts = [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
        with strategy.scope():
            self.variables = [
                hs.Variable(move(start), name=f"v{n}") for n, start in enumerate(starts)
            ]
            self.optimizer = make()

    def gradients(self, step: int, rank: int) -> list[Any]:
        """Return a replica's gradients as NumPy arrays."""
        rng = np.random.default_rng(100 * step + rank)
        # Sums of these numbers are exact, so the different orders of algorithms do not
        # matter.
        return [
            np.asarray(rng.integers(-64, 64, v.shape) / 64, self.dtype)
            for v in self.variables
        ]

    def step(self, gradients: list[Any]) -> bool:
        """Make a step with the given gradients."""
        moved = [self.move(gradient) for gradient in gradients]
        pairs = list(zip(moved, self.variables, strict=True))
        updated = self.strategy.run(self.optimizer.apply_gradients, (pairs,))
        return bool(self.strategy.local_value(updated))

    def state(self) -> dict[str, Any]:
        """Return all variables and slots as NumPy arrays."""
        slots = self.optimizer.checkpoint_variables()
        found = {name: v.numpy() for name, v in slots.items() if "sum/" not in name}
        return found | {v.name: v.numpy() for v in self.variables}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "f"),
        pytest.param({}, "d", marks=pytest.mark.full),
        pytest.param({"aggregation": "mean"}, "f", marks=pytest.mark.full),
        ({"aggregation": "mean"}, "d"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_the_host(
    strategy: Any, job: Any, rule: str, dtype: str, options: Any
) -> None:
    def make() -> Any:
        return RULES[rule](**options)

    models = [Model(strategy, make, m, SHAPES, dtype) for m in (np.array, cupy.asarray)]
    for step in range(4):
        for model in models:
            assert model.step(model.gradients(step, job.rank))
    host, device = (model.state() for model in models)
    assert all(is_device(v.component) for v in models[1].variables)
    assert_same_bits(job, *device.values())
    for name, value in host.items():
        if rule == "lamb":
            np.testing.assert_allclose(value, device[name], rtol=1e-5, atol=1e-7)
        else:
            assert value.tobytes() == device[name].tobytes(), name


@pytest.mark.parametrize("rule", ["sgd", "adamw", "lamb"])
@pytest.mark.parametrize(
    "options", [{"accumulate_steps": 2}, {"clip_global_norm": 1.0}], ids=str
)
def test_sums_over_calls_and_clipping(
    strategy: Any, job: Any, rule: str, options: Any
) -> None:
    def make() -> Any:
        return RULES[rule](**options)

    models = [Model(strategy, make, m, SHAPES, "d") for m in (np.array, cupy.asarray)]
    for step in range(4):
        for model in models:
            model.step(model.gradients(step, job.rank))
    host, device = (model.state() for model in models)
    assert_same_bits(job, *device.values())
    for name, value in host.items():
        np.testing.assert_allclose(
            value, device[name], rtol=1e-12, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adamw"])
def test_sparse_gradients(strategy: Any, job: Any, rule: str) -> None:
    shapes = [(7, 2), (5,)]
    models = [
        Model(strategy, RULES[rule], m, shapes, "d") for m in (np.array, cupy.asarray)
    ]
    rng = np.random.default_rng(job.rank)
    for step in range(4):
        count = 0 if job.rank == 0 and step % 2 else 5
        values, indices = rng.standard_normal((count, 2)), rng.integers(0, 6, count)
        dense = rng.standard_normal(5)
        for model in models:
            rows = hs.IndexedSlices(model.move(values), model.move(indices), (7, 2))
            pairs = [
                (rows, model.variables[0]),
                (model.move(dense), model.variables[1]),
            ]
            strategy.run(model.optimizer.apply_gradients, (pairs,))
    host, device = (model.state() for model in models)
    assert_same_bits(job, *device.values())
    for name, value in host.items():
        np.testing.assert_allclose(
            value, device[name], rtol=1e-12, atol=1e-12, err_msg=name
        )


def test_variables_in_both_kinds_of_memory(strategy: Any, job: Any) -> None:
    def make() -> Any:
        return RULES["adamw"](clip_global_norm=2.0)

    host = Model(strategy, make, np.array, [(40, 30), (5,), (3,)], "d")

    def move(array: Any) -> Any:
        return np.array(array) if array.shape == (5,) else cupy.asarray(array)

    mixed = Model(strategy, make, move, [(40, 30), (5,), (3,)], "d")
    for step in range(3):
        found = host.gradients(step, job.rank)
        host.step(found)
        mixed.step(found)
    kinds = [is_device(v.component) for v in mixed.variables]
    assert kinds == [True, False, True]
    state = mixed.state()
    assert_same_bits(job, *state.values())
    for name, value in host.state().items():
        np.testing.assert_allclose(
            value, state[name], rtol=1e-12, atol=1e-12, err_msg=name
        )


def test_gradients_in_other_memory_fail_on_all_ranks(strategy: Any, job: Any) -> None:
    model = Model(strategy, RULES["sgd"], cupy.asarray, [(3,)], "d")
    before = model.state()
    faulty = job.size - 1
    if job.rank == faulty:
        model.move = np.array
    error = outcome(model.step, [np.ones(3)])
    if job.rank == faulty:
        assert isinstance(error, ValueError)
        assert "variable 'v0', which is there, found one on CPU:0" in str(error)
    else:
        assert isinstance(error, hs.ReplicaError)
    assert all(np.array_equal(before[name], v) for name, v in model.state().items())
    assert_usable(strategy, job)


@pytest.mark.skipif(standin is None, reason="only the stand-in counts")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"clip_global_norm": 1.0}], ids=str)
def test_steps_do_not_wait_for_the_gpu(made: Any, rule: str, options: Any) -> None:
    """A step's own code does not wait; the reduction may wait."""
    assert standin is not None
    strategy = made()
    model = Model(strategy, lambda: RULES[rule](**options), cupy.asarray, SHAPES)
    gradients = [model.move(g) for g in model.gradients(0, 0)]
    found = []
    for _ in range(LAG + 4):
        pairs = list(zip(gradients, model.variables, strict=True))
        start = standin.counts.synchronizations
        strategy.run(lambda: None)
        between = standin.counts.synchronizations
        strategy.run(_update_alone, (model.optimizer, pairs))
        found.append(standin.counts.synchronizations - between + between - start)
        # Wait, so that the host is not a round ahead of the GPU.
        cupy.cuda.get_current_stream().synchronize()
    assert found[2:] == [0] * (LAG + 2)


def _update_alone(optimizer: Any, pairs: Any) -> None:
    """Make a step with a reduction that returns copies of the gradients."""
    collectives = hs.get_strategy().collectives
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            collectives,
            "batch_reduce",
            lambda op, trees, what, *args, **kwargs: [t.copy() for t in trees],
        )
        optimizer.apply_gradients(pairs)


@pytest.fixture
def guarded(made: Any) -> Callable[..., Model]:
    """Return a function that makes a model with a policy."""

    def make(policy: str, rule: str = "adamw", **options: Any) -> Model:
        strategy = made(non_finite=policy)
        shapes = [(60, 50), (5,)]
        return Model(strategy, lambda: RULES[rule](**options), cupy.asarray, shapes)

    return make


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_origin_of_what_is_not_finite_is_named(
    guarded: Any, job: Any, value: float
) -> None:
    model = guarded("raise")
    model.step(model.gradients(0, job.rank))
    before = model.state()
    faulty = job.size - 1
    gradients = model.gradients(1, job.rank)
    if job.rank == faulty:
        gradients[0][3, 4] = value
        gradients[1][2] = value
    error = outcome(model.step, gradients)
    assert isinstance(error, hs.NonFiniteError)
    assert (
        f"the gradient of variable 'v0' is {value} in element (3, 4), from replicas "
        f"[{faulty}], and 1 more gradients are not finite" in str(error)
    )
    after = model.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert model.step(model.gradients(2, job.rank))
    assert_usable(model.strategy, job)


@pytest.mark.parametrize("rule", RULES)
def test_steps_that_are_not_finite_are_left_out(
    guarded: Any, job: Any, rule: str
) -> None:
    model = guarded("skip", rule)
    assert model.step(model.gradients(0, job.rank))
    before = model.state()
    gradients = model.gradients(1, job.rank)
    if job.rank == 0:
        gradients[1][0] = np.nan
    for number in (1, 2):
        assert not model.step(gradients)
        assert model.optimizer.skipped_steps == number
    after = model.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert model.step(model.gradients(2, job.rank))


def test_warnings_tell_what_was_applied(
    guarded: Any, job: Any, lines: list[str]
) -> None:
    model = guarded("warn")
    gradients = model.gradients(0, job.rank)
    gradients[1][4] = np.nan
    assert model.step(gradients)
    told = job.allgather(lines)
    assert "'v1' is nan in element (4,), from replicas [0" in told[0][0]
    assert not any(told[1:])
    assert np.isnan(model.variables[1].numpy()[4])


def large(strategy: Any, **more: Any) -> list[Any]:
    """Return variables so large that their comparison takes many slices."""
    rng = np.random.default_rng(0)
    kinds = [((300, 400), "d"), ((), "f"), ((0,), "f"), ((70_000,), "e"), ((5,), "D")]
    with strategy.scope():
        return [
            hs.Variable(cupy.asarray(rng.standard_normal(shape)).astype(dtype), name=n)
            for (shape, dtype), n in zip(kinds, "vwxyz", strict=True)
        ]


def flip(variable: Any, place: int, bit: int) -> tuple[int, ...]:
    """Flip a bit of an element on the GPU; return the element's index."""
    array = cupy.asnumpy(variable.component)
    octets = array.reshape(-1)[place : place + 1].view(np.uint8)
    octets[bit // 8 % octets.size] ^= 1 << bit % 8
    variable.component[...] = cupy.asarray(array)
    return tuple(int(i) for i in np.unravel_index(place, array.shape))


def test_a_flipped_bit_is_found_in_a_round(made: Any, job: Any, several: None) -> None:
    strategy = made()
    variables = large(strategy)
    rng = np.random.default_rng(3)
    assert error_within(strategy, 3) is None
    for turn, name in enumerate("vwyzvvyv"):
        target = next(v for v in variables if v.name == name)
        place, bit = int(rng.integers(target.size)), int(rng.integers(128))
        faulty, right = turn % job.size, target.numpy()
        element = np.unravel_index(place, target.shape)
        if job.rank == faulty:
            flip(target, place, bit)
        error = error_within(strategy, round_length(strategy))
        assert isinstance(error, hs.DivergenceError), repr(error)
        assert error.variable == name
        assert error.element == tuple(int(i) for i in element)
        assert error.ranks == named_ranks(faulty, job.size)
        target.assign(cupy.asarray(right))
        assert error_within(strategy, 2) is None
    assert error_within(strategy, 2 * round_length(strategy)) is None
    strategy.check_divergence()


def test_slices_take_every_byte_once(made: Any, several: None) -> None:
    strategy = made()
    variables = large(strategy)
    copies = strategy._connection.copies
    assert copies.num_slices == len(copies._on_device.slices) + LAG
    total = sum(variable.component.nbytes for variable in variables)
    found = [piece for part in copies._on_device.slices for piece in part]
    assert sum(piece.array.nbytes for piece in found) == total
    for variable in variables:
        own = [p for p in found if p.variable() is variable]
        assert sum(piece.array.size for piece in own) == variable.size
        starts = [piece.start for piece in own]
        assert starts == sorted(set(starts))


def test_what_is_compared_is_of_one_point_of_the_program(
    made: Any, job: Any, several: None
) -> None:
    """Ranks hash the same bytes, whether they are far ahead of their GPUs or not."""
    strategy = made()
    (x, *_) = large(strategy)
    for number in range(3 * round_length(strategy)):
        # The GPU of one rank finishes all its work; the other GPUs do not.
        if number % job.size == job.rank:
            cupy.cuda.get_current_stream().synchronize()
        strategy.run(lambda: hs.get_replica_context().all_reduce("sum", np.float32(1)))
        for _ in range(3):
            x.component[...] += 1
    strategy.check_divergence()


def test_copies_that_are_left_out_are_awaited(made: Any, several: None) -> None:
    """Copies in flight must end before other users get their page-locked memory."""
    strategy = made()
    (x, *_) = large(strategy)
    for _ in range(3):
        for _ in range(9):
            x.component[...] += 1
        strategy.run(lambda: None)
    lagging = strategy._connection.copies._on_device
    marks = [copied.mark for copied in lagging._under_way]
    lagging.forget_copies()
    assert marks
    assert all(mark.passed() for mark in marks)


def test_full_comparisons_see_all_bytes(made: Any, job: Any, several: None) -> None:
    strategy = made(divergence="full", divergence_interval=5)
    with strategy.scope():
        x = hs.Variable(cupy.zeros(1 << 19), name="x")
    assert error_within(strategy, 5) is None
    if job.rank == 0:
        x.component[-1] = 1
    error = error_within(strategy, 5)
    assert isinstance(error, hs.DivergenceError)
    assert error.element == ((1 << 19) - 1,)


@pytest.mark.parametrize("dtype", ["e", "f", "d", "F"])
def test_tolerance_is_relative_to_the_variable(
    made: Any, job: Any, several: None, dtype: str
) -> None:
    strategy = made(divergence="full", divergence_interval=3, divergence_tolerance=0.01)
    drawn = np.random.default_rng(1)
    start = drawn.uniform(-1, 1, 70_000).astype(dtype)
    start[:3] = 1, np.inf, np.nan
    with strategy.scope():
        x = hs.Variable(cupy.asarray(start), name="x")
    if job.rank == 0:
        x.component[40_000:] += np.dtype(dtype).type(0.005)
    assert error_within(strategy, 7) is None
    strategy.check_divergence()
    if job.rank == 0:
        x.component[66_000] += np.dtype(dtype).type(0.5)
    error = error_within(strategy, 3)
    assert isinstance(error, hs.DivergenceError)
    assert error.element == (66_000,)
    assert error.ranks == named_ranks(0, job.size)
    assert_usable(strategy, job)


def test_parts_in_turn_find_what_differs(made: Any, job: Any, several: None) -> None:
    strategy = made("raise", divergence="off")
    variables = {v.name: v for v in large(strategy)}
    divergence.check_mirrored(strategy, variables)
    if job.rank == 1:
        variables["y"].component[66_666] = 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "_LEAST_BYTES", 100_000)
        patch.setattr(divergence, "_PARTS", 1 << 40)
        errors = [
            outcome(divergence.check_mirrored, strategy, variables, turn)
            for turn in range(12)
        ]
    found = [error for error in errors if error is not None]
    assert len(found) == 1
    assert (found[0].variable, found[0].element) == ("y", (66_666,))


def test_a_variable_that_is_freed_later_elsewhere_is_no_error(
    made: Any, job: Any, several: None
) -> None:
    strategy = made()
    with strategy.scope():
        kept = hs.Variable(cupy.zeros(90_000), name="kept")
    gc.collect()
    gc.disable()
    try:
        for turn in range(4):
            with strategy.scope():
                cycle: list[Any] = [hs.Variable(cupy.zeros(100), name="freed")]
            cycle.append(cycle)
            del cycle
            if job.rank == turn % job.size:
                gc.collect()
            assert error_within(strategy, 2 * LAG) is None
            gc.collect()
            assert error_within(strategy, 2 * LAG) is None
    finally:
        gc.enable()
    kept.component[0] = job.rank
    error = error_within(strategy, round_length(strategy))
    assert isinstance(error, hs.DivergenceError)
    assert error.variable == "kept"


def test_nan_in_a_variable_is_told_once(
    made: Any, job: Any, several: None, lines: list[str]
) -> None:
    strategy = made()
    with strategy.scope():
        hs.Variable(cupy.full((), np.inf), trainable=False, name="best")
        weights = hs.Variable(cupy.zeros((10, 100), "f"), name="weights")
    assert error_within(strategy, 40) is None
    assert lines == []
    weights.component[3, 7] = np.nan
    assert error_within(strategy, 100) is None
    told = job.allgather(lines)
    assert len(told[0]) == 1
    assert "'weights' is nan in element (3, 7)" in told[0][0]
    assert not any(told[1:])


def test_training_is_watched_and_never_stopped(
    made: Any, job: Any, several: None
) -> None:
    strategy = made()
    model = Model(strategy, RULES["adamw"], cupy.asarray, SHAPES)
    for step in range(3 * LAG):
        assert model.step(model.gradients(step, job.rank))
    if job.rank == 0:
        model.variables[3].component[9000] += np.float32(1)
    errors = [
        outcome(model.step, model.gradients(step, job.rank))
        for step in range(round_length(strategy))
    ]
    found = [error for error in errors if error is not None]
    assert found
    assert isinstance(found[0], hs.DivergenceError)
    assert found[0].variable == "v3"


def test_counters_stay_on_the_host_where_all_else_goes_to_the_gpu(
    made: Any, job: Any
) -> None:
    strategy = made(device="gpu")

    def make() -> Any:
        return RULES["adamw"](accumulate_steps=2)

    model = Model(strategy, make, cupy.asarray, [(3,)])
    for step in range(3):
        model.step(model.gradients(step, job.rank))
    state = model.optimizer.checkpoint_variables()
    on_gpu = {name for name, v in state.items() if is_device(v.component)}
    assert on_gpu == {"first_moment/v0", "second_moment/v0", "gradient_sum/v0"}
