"""Optimizers on GPU arrays in one process, compared with the same ones on the host.

The tests need CuPy, or its stand-in, which `test_updates.py` puts on the path.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat import optimizers
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.arrays.row_updates import summed_rows
from hpcstrat.optimizers.non_finite import are_finite

# CuPy before 14 has no arrays of bfloat16.
DTYPES = ["f", "d", "e"]
SHAPES = [(), (0,), (1,), (3, 5), (8193,), (70, 300), (2, 0, 3)]

RULES: dict[str, Any] = {
    "sgd": lambda **o: optimizers.SGD(0.05, **o),
    "schedule": lambda **o: optimizers.SGD(lambda step: 0.1 / (1 + step), **o),
    "momentum": lambda **o: optimizers.SGD(0.02, 0.9, **o),
    "nesterov": lambda **o: optimizers.SGD(0.02, 0.9, nesterov=True, **o),
    "adagrad": lambda **o: optimizers.Adagrad(0.1, 0.2, 1e-6, **o),
    "adam": lambda **o: optimizers.Adam(0.02, epsilon=1e-4, **o),
    "adamw": lambda **o: optimizers.AdamW(0.02, 0.1, epsilon=1e-4, exclude=["v1"], **o),
    "lamb": lambda **o: optimizers.LAMB(0.05, 0.1, epsilon=1e-4, exclude=["v0"], **o),
}
# Rules with norms, which are summed in another order than on the host.
WITH_NORMS = ("lamb",)

quick = settings(
    max_examples=5 if "--short" in sys.argv else 15,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def drawn(rng: np.random.Generator, shape: Any, dtype: Any) -> Any:
    """Return random numbers between 0.5 and 2 with random signs."""
    return rng.uniform(0.5, 2, shape).astype(dtype) * rng.choice([-1, 1], shape).astype(
        dtype
    )


class Twins:
    """The same variables and optimizer in host memory, and on the GPU."""

    def __init__(self, make: Any, values: list[Any], **options: Any) -> None:
        names = [f"v{number}" for number in range(len(values))]
        pairs = list(zip(values, names, strict=True))
        self.host = [hs.Variable(value.copy(), name=name) for value, name in pairs]
        self.device = [
            hs.Variable(cupy.asarray(value), name=name) for value, name in pairs
        ]
        self.optimizers = make(**options), make(**options)

    def step(self, gradients: list[Any]) -> None:
        """Make a step with both optimizers."""
        one, other = self.optimizers
        with np.errstate(all="ignore"):
            one.apply_gradients(zip(gradients, self.host, strict=True))
        moved = [on_gpu(gradient) for gradient in gradients]
        other.apply_gradients(zip(moved, self.device, strict=True))

    def all(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, host and device value of variables and state."""
        one, other = self.optimizers
        for first, second in zip(self.host, self.device, strict=True):
            assert is_device(second.component)
            yield first.name, first.numpy(), second.numpy()
        state = other.checkpoint_variables()
        for name, variable in one.checkpoint_variables().items():
            yield name, variable.numpy(), state[name].numpy()

    def check(self, exact: bool = True) -> None:
        """Assert equal bits, or values that are equal except for rounding."""
        for name, first, second in self.all():
            assert first.dtype == second.dtype
            assert first.shape == second.shape
            if exact or first.dtype.kind == "i":
                assert first.tobytes() == second.tobytes(), name
            elif first.dtype.itemsize == 2:
                np.testing.assert_allclose(first, second, 0.05, 1e-2, err_msg=name)
            else:
                eps = 16 * float(np.finfo(first.dtype).eps) if first.size else 0
                np.testing.assert_allclose(first, second, rtol=eps, atol=eps)


def on_gpu(gradient: Any) -> Any:
    """Return the gradient as an array on the GPU."""
    if isinstance(gradient, hs.IndexedSlices):
        values, indices = cupy.asarray(gradient.values), cupy.asarray(gradient.indices)
        return hs.IndexedSlices(values, indices, gradient.dense_shape)
    return cupy.asarray(gradient)


@pytest.mark.parametrize("rule", RULES)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
        min_size=1,
        max_size=6,
    ),
    options=st.sampled_from(
        [
            {},
            {"aggregation": "mean"},
            {"accumulate_steps": 2},
            {"accumulate_steps": 3, "aggregation": "mean"},
            {"clip_global_norm": 0.75},
            {"clip_global_norm": 1e9},
        ]
    ),
    seed=st.integers(0, 1000),
)
@quick
def test_rules_round_as_on_the_host(
    rule: str, kinds: Any, options: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kinds = [(shape, np.dtype(dtype)) for dtype, shape in kinds]
    twins = Twins(RULES[rule], [drawn(rng, *kind) for kind in kinds], **options)
    for _ in range(4):
        twins.step([drawn(rng, *kind) for kind in kinds])
    exact = rule not in WITH_NORMS and options.get("clip_global_norm") != 0.75
    twins.check(exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in WITH_NORMS])
def test_extreme_numbers_round_as_on_the_host(rule: str, dtype: str) -> None:
    """Test subnormal numbers, ties and infinity; the bits of NaN may differ."""
    kind = np.dtype(dtype)
    bits = np.random.default_rng(3).integers(0, 1 << 16, 20_000).astype(np.uint16)
    if kind.itemsize == 2:
        values = bits.view(kind)
    else:
        wide = np.random.default_rng(4).integers(0, 1 << 63, 20_000).astype(np.uint64)
        values = wide.view("d") if dtype == "d" else wide.astype(np.uint32).view("f")
    gradients = np.roll(values, 7)
    twins = Twins(RULES[rule], [values])
    for turn in range(3):
        with np.errstate(all="ignore"):
            twins.step([np.roll(gradients, turn)])
    for name, first, second in twins.all():
        nan = np.isnan(first)
        assert np.array_equal(nan, np.isnan(second)), name
        assert (first[~nan] == second[~nan]).all(), name


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in WITH_NORMS])
@pytest.mark.parametrize(
    "options",
    [
        {"clip_global_norm": 1e-3},
        {"clip_global_norm": 0.7, "accumulate_steps": 3, "aggregation": "mean"},
    ],
    ids=str,
)
def test_factors_of_half_types_are_those_of_the_host(rule: str, options: Any) -> None:
    # Sums of squares of numbers from `drawn` are exact in any order.
    rng = np.random.default_rng(5)
    shapes = (9000,), (3, 5)
    twins = Twins(RULES[rule], [drawn(rng, each, "e") for each in shapes], **options)
    large = np.float16(1 << 13 if "accumulate_steps" in options else 1 << 14)
    for _ in range(3):
        before = [variable.numpy() for variable in twins.host]
        gradients = [drawn(rng, each, "e") * large for each in shapes]
        for _ in range(options.get("accumulate_steps", 1)):
            twins.step(gradients)
    twins.check()
    if "accumulate_steps" in options:
        pairs = zip(before, twins.host, strict=True)
        assert all((old != new.numpy()).any() for old, new in pairs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_steps": 2}, {"clip_global_norm": 1.5}, {"aggregation": "mean"}],
    ids=str,
)
def test_sparse_gradients_are_those_of_the_host(rule: str, options: Any) -> None:
    rng = np.random.default_rng(2)
    start = [rng.standard_normal((7, 2)), rng.standard_normal(5)]
    twins = Twins(RULES[rule], start, **options)
    for step in range(4):
        count = 9 if step % 3 else 0
        rows = rng.standard_normal((count, 2)), rng.integers(0, 6, count)
        twins.step([hs.IndexedSlices(*rows, (7, 2)), rng.standard_normal(5)])
    twins.check(exact=False)


@given(
    dtype=st.sampled_from([*DTYPES, "F", "D"]),
    count=st.integers(0, 40),
    width=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    length=st.integers(1, 8),
    seed=st.integers(0, 100),
)
@quick
def test_rows_that_come_several_times_are_added_in_their_order(
    dtype: str, count: int, width: Any, length: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = drawn(rng, (count, *width), np.dtype(dtype))
    indices = rng.integers(0, length, count)
    expected = np.zeros((length, *width), values.dtype)
    np.add.at(expected, indices, values)
    unique, rows = summed_rows(cupy.asarray(indices), cupy.asarray(values))
    assert cupy.asnumpy(unique).tolist() == sorted(set(indices.tolist()))
    exact = expected[cupy.asnumpy(unique)]
    assert cupy.asnumpy(rows).tobytes() == exact.tobytes()


@pytest.mark.parametrize("rule", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("limit", [None, 0.3])
def test_complex_variables_and_those_in_host_memory_take_part(
    rule: str, limit: float | None
) -> None:
    rng = np.random.default_rng(1)
    values = [np.arange(1, 7).reshape(2, 3) * (1 + 0.5j), np.ones(4), np.ones(4, "f")]
    twins = Twins(RULES[rule], values, clip_global_norm=limit)
    # The second variable is in host memory in both optimizers.
    twins.device[1] = hs.Variable(np.ones(4), name="v1")
    for _ in range(3):
        gradients = [
            rng.standard_normal((2, 3)) * (1 - 2j),
            rng.standard_normal(4),
            rng.standard_normal(4).astype("f"),
        ]
        for optimizer, variables, move in zip(
            twins.optimizers,
            (twins.host, twins.device),
            (np.asarray, cupy.asarray),
            strict=True,
        ):
            moved = [move(gradients[0]), gradients[1], move(gradients[2])]
            optimizer.apply_gradients(zip(moved, variables, strict=True))
    for first, second in zip(twins.host, twins.device, strict=True):
        np.testing.assert_allclose(first.numpy(), second.numpy(), rtol=1e-6)


class Signs(optimizers.Optimizer):
    """A user's rule whose code knows nothing of GPUs."""

    state = {"last": 0.0}  # noqa: RUF012

    def update(self, step: Any, gradient: Any, value: Any, *slots: Any) -> None:
        (last,) = slots
        last[...] = np.sign(gradient) + last / 2
        value -= np.multiply(last, value.dtype.type(step.rate), out=self._scratch(last))


class Ascent(optimizers.Adam):
    """A rule that overrides the update of its base."""

    def update(self, step: Any, gradient: Any, value: Any, *slots: Any) -> None:
        value += gradient


class Reversed(optimizers.AdamW):
    """A rule that overrides the direction of its base."""

    def _direction(self, step: Any, gradient: Any, m: Any, v: Any) -> None:
        gradient *= -1


class Renamed(optimizers.AdamW):
    """A subclass that keeps the rule of its base."""


@pytest.mark.parametrize("kind", [Signs, Ascent, Reversed, Renamed])
def test_rules_of_subclasses_are_theirs(kind: Any) -> None:
    rng = np.random.default_rng(5)
    values = [drawn(rng, shape, "f") for shape in [(), (3, 4), (9000,)]]
    twins = Twins(lambda **o: kind(0.5, **o), values, clip_global_norm=1e9)
    for _ in range(3):
        twins.step([drawn(rng, value.shape, "f") for value in values])
    twins.check()


def test_copies_of_optimizers_do_not_share_state() -> None:
    rng = np.random.default_rng(0)
    twins = Twins(RULES["adam"], [drawn(rng, (5,), "d")])
    twins.step([drawn(rng, (5,), "d")])
    copied = copy.deepcopy(twins.optimizers[1])
    twins.step([drawn(rng, (5,), "d")])
    twins.check()
    state = copied.checkpoint_variables()
    assert int(state["iterations"]) == 1
    own = twins.optimizers[1].checkpoint_variables()["first_moment/v0"]
    assert not np.array_equal(state["first_moment/v0"].numpy(), own.numpy())


def test_state_is_in_the_memory_of_the_variable_and_counters_on_the_host() -> None:
    variable = hs.Variable(cupy.ones(3), name="w")
    optimizer = optimizers.Adam(0.1, accumulate_steps=2)
    optimizer.checkpoint_defer("first_moment/w", np.full(3, 7.0))
    optimizer.build([variable])
    state = optimizer.checkpoint_variables()
    on_gpu = {name for name, v in state.items() if is_device(v.component)}
    assert on_gpu == {"first_moment/w", "second_moment/w", "gradient_sum/w"}
    assert state["first_moment/w"].numpy().tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    ("gradient", "value", "text"),
    [
        (np.ones(3), "gpu", "a gradient on GPU:0 for variable 'w', .* on CPU:0; copy"),
        (
            cupy.ones(3),
            "cpu",
            "a gradient on CPU:0 for variable 'w', .* on GPU:0; make",
        ),
    ],
)
def test_gradients_in_other_memory_are_refused(
    gradient: Any, value: str, text: str
) -> None:
    ones = cupy.ones(3) if value == "gpu" else np.ones(3)
    variable = hs.Variable(ones, name="w")
    rows = hs.IndexedSlices(gradient, [0, 1, 2])
    for optimizer in (optimizers.SGD(0.1), optimizers.Adam(0.1)):
        with pytest.raises(ValueError, match=text):
            optimizer.apply_gradients([(gradient, variable)])
        with pytest.raises(ValueError, match=text):
            optimizer.apply_gradients([(rows, hs.Variable(ones, name="w"))])
        optimizer.apply_gradients([([1, 2, 3.5], variable)])


def test_gradients_need_not_be_contiguous_and_are_not_modified() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    for options in ({}, {"accumulate_steps": 2}, {"clip_global_norm": 0.1}):
        twins = Twins(RULES["lamb"], [np.ones((3, 4)), np.ones(4)], **options)
        moved = cupy.asarray(whole)
        for _ in range(2):
            twins.optimizers[0].apply_gradients(
                zip([whole.T[::2], whole[:, 1]], twins.host, strict=True)
            )
            twins.optimizers[1].apply_gradients(
                zip([moved.T[::2], moved[:, 1]], twins.device, strict=True)
            )
        twins.check(exact=False)
        assert np.array_equal(cupy.asnumpy(moved), whole)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_clipping_of_what_is_not_finite_shows(value: float) -> None:
    variables = [hs.Variable(cupy.ones(n), name=f"v{n}") for n in (2, 3)]
    optimizer = optimizers.SGD(0.1, clip_global_norm=1.0)
    gradients = [cupy.asarray([1.0, value]), cupy.ones(3)]
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    for variable in variables:
        assert np.isnan(variable.numpy()).all()


def test_norms_are_those_of_the_host_and_always_the_same() -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 255, 8193, 100_001):
        array = rng.standard_normal(size).astype("f")
        found = {
            float(optimizers.gradients.sum_of_squares(cupy.asarray(array)))
            for _ in range(3)
        }
        exact = float((array.astype("d") ** 2).sum())
        assert len(found) == 1
        assert found.pop() == pytest.approx(exact, rel=1e-13)


def test_what_is_not_finite_is_found() -> None:
    arrays = [np.ones(shape, dtype) for shape in SHAPES for dtype in "edfFD"]
    moved = [cupy.asarray(array) for array in arrays]
    assert are_finite(moved)
    assert are_finite([])
    largest = cupy.asarray(np.array([65504, -65504], "e"))
    assert are_finite([largest, largest])
    for number in range(len(arrays)):
        if not arrays[number].size:
            continue
        for value in (np.nan, np.inf, -np.inf):
            bad = arrays[number].copy()
            bad.reshape(-1)[-1] = value
            changed = [*moved[:number], cupy.asarray(bad), *moved[number + 1 :]]
            assert not are_finite(changed)
