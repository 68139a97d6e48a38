"""Optimizers in one process: parameters, helpers, and steps computed by hand."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import optimizers
from hpcstrat.optimizers.gradients import clip_to_norm, merged_rows, sum_of_squares
from tests.docs.page import blocks

ALL = ("SGD", "Adagrad", "Adam", "AdamW", "LAMB")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "wrong",
    [
        {"accumulate_steps": 0},
        {"accumulate_steps": 1.5},
        {"clip_global_norm": 0.0},
        {"clip_global_norm": math.nan},
        {"missing_gradients": "zero"},
        {"aggregation": "none"},
    ],
    ids=str,
)
def test_common_parameters_out_of_range_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        getattr(optimizers, name)(0.1, **wrong)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("SGD", {"momentum": -0.1}),
        ("SGD", {"nesterov": True}),
        ("Adagrad", {"initial_accumulator_value": -1.0}),
        ("Adagrad", {"epsilon": 0.0}),
        ("Adam", {"beta_1": 1.0}),
        ("Adam", {"beta_2": -0.1}),
        ("Adam", {"epsilon": 0.0}),
        ("AdamW", {"weight_decay": -1.0}),
        ("AdamW", {"exclude": ["("]}),
        ("LAMB", {"weight_decay": math.nan}),
        ("LAMB", {"exclude": [3]}),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        getattr(optimizers, name)(0.1, **wrong)


@pytest.mark.parametrize("name", ALL)
def test_unknown_parameters_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="clipnorm"):
        getattr(optimizers, name)(0.1, clipnorm=1.0)


def test_an_update_rule_is_all_that_a_subclass_needs() -> None:
    class Signs(optimizers.Optimizer):
        def update(self, step: Any, gradient: Any, value: Any, *slots: Any) -> None:
            value -= step.rate * np.sign(gradient)

    variable = hs.Variable(np.zeros(2), name="v")
    optimizer = Signs(0.5, accumulate_steps=2)
    pairs = [(np.array([3.0, -2.0]), variable)]
    assert [optimizer.apply_gradients(pairs) for _ in range(4)] == [False, True] * 2
    np.testing.assert_array_equal(variable, [-1, 1])
    with pytest.raises(TypeError, match="abstract"):
        optimizers.Optimizer(0.1)  # type: ignore[abstract]


def test_first_steps_of_adam_have_the_length_of_the_rate() -> None:
    # The bias corrections cancel: m' / sqrt(v') is the gradient's sign.
    variable = hs.Variable(np.zeros(3), name="v")
    optimizer = optimizers.Adam(0.25, epsilon=1e-12)
    optimizer.apply_gradients([(np.array([1e-3, -4.0, 50.0]), variable)])
    np.testing.assert_allclose(variable, [-0.25, 0.25, -0.25], rtol=1e-8)


def test_moments_of_adam_are_saved_by_their_names() -> None:
    weights = hs.Variable(np.zeros(2), name="w")
    optimizer = optimizers.Adam(0.1)
    gradient = np.array([3.0, -2.0])
    optimizer.apply_gradients([(gradient, weights)])
    state = optimizer.checkpoint_variables()
    np.testing.assert_allclose(state["first_moment/w"].numpy(), 0.1 * gradient)
    np.testing.assert_allclose(state["second_moment/w"].numpy(), 0.001 * gradient**2)


def test_first_step_of_lamb_has_the_length_of_the_variable() -> None:
    variable = hs.Variable(np.array([3.0, 4.0]), name="v")
    optimizers.LAMB(0.1, 0.0, epsilon=1e-12).apply_gradients([(np.ones(2), variable)])
    step = np.array([3.0, 4.0]) - variable.numpy()
    assert np.linalg.norm(step) == pytest.approx(0.1 * 5)


@pytest.mark.parametrize("exclude", ["bias", ["x", "ias$"]])
def test_excluded_variables_do_not_decay(exclude: Any) -> None:
    names = ("kernel", "bias")
    variables = [hs.Variable(np.ones(2), name=name) for name in names]
    optimizer = optimizers.AdamW(0.5, 0.1, exclude=exclude)
    optimizer.apply_gradients([(np.zeros(2), variable) for variable in variables])
    np.testing.assert_allclose(variables[0], [0.95, 0.95])
    np.testing.assert_array_equal(variables[1], [1, 1])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_every_floating_type_and_scalars_are_trained(name: str, dtype: Any) -> None:
    variables = [hs.Variable(np.ones(s, dtype), name=f"v{len(s)}") for s in ((), (2,))]
    optimizer = getattr(optimizers, name)(0.5, clip_global_norm=0.5)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(v.shape), v) for v in variables])
    for variable in variables:
        assert variable.dtype == dtype
        assert (variable.numpy() < 1).all()


def test_gradients_are_not_modified() -> None:
    gradient = np.array([1.0, 2.0])
    rows = hs.IndexedSlices(np.ones((2, 2)), [1, 1], (3, 2))
    for name in ALL:
        dense, sparse = hs.Variable(np.ones(2), name="d"), hs.Variable(np.ones((3, 2)))
        options = {"clip_global_norm": 0.1, "accumulate_steps": 2}
        for optimizer in (
            getattr(optimizers, name)(0.1),
            getattr(optimizers, name)(0.1, **options),
        ):
            for _ in range(2):
                optimizer.apply_gradients([(gradient, dense), (rows, sparse)])
    np.testing.assert_array_equal(gradient, [1, 2])
    np.testing.assert_array_equal(rows.values, np.ones((2, 2)))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ALL)
def test_a_step_allocates_the_reduced_buffer_only(name: str, steps: int) -> None:
    variable = hs.Variable(np.ones(400_000), name="v")
    options = {"clip_global_norm": 0.1, "accumulate_steps": steps}
    optimizer = getattr(optimizers, name)(0.1, **options)
    gradient = np.ones(400_000)
    for _ in range(steps):
        optimizer.apply_gradients([(gradient, variable)])
    tracemalloc.start()
    try:
        for _ in range(2 * steps):
            optimizer.apply_gradients([(gradient, variable)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * gradient.nbytes


def test_norms_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n) for n in (0, 1, 100_001)]
    arrays.append(rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4)))
    exact = [float((abs(a) ** 2).sum()) for a in arrays]
    for array, square in zip(arrays, exact, strict=True):
        assert sum_of_squares(array) == pytest.approx(square, rel=1e-14)
    before = [array.copy() for array in arrays]
    norm = math.sqrt(sum(exact))
    assert clip_to_norm(arrays, 2 * norm) == pytest.approx(norm, rel=1e-14)
    assert all(map(np.array_equal, arrays, before))
    clip_to_norm(arrays, norm / 4)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_allclose(array, old / 4, rtol=1e-13)


def test_norms_do_not_overflow_narrow_types() -> None:
    array = np.full(4, 1e30, np.float32)
    assert sum_of_squares(array) == pytest.approx(4e60, rel=1e-6)
    assert clip_to_norm([array], 1.0) == pytest.approx(2e30, rel=1e-6)
    np.testing.assert_allclose(array, 0.5, rtol=1e-6)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_factors_of_half_types_are_not_rounded_to_nothing(name: str) -> None:
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name
    array = np.array([60000.0, 0.0, -30000.0], dtype)
    norm = float(np.hypot(60000, 30000))
    assert clip_to_norm([array], 1e-3) == pytest.approx(norm, rel=1e-2)
    wanted = 1e-3 * np.array([2, 0, -1]) / np.sqrt(5)
    np.testing.assert_allclose(array.astype(float), wanted, rtol=1e-2)
    variable = hs.Variable(np.zeros(2, np.float16))
    optimizer = optimizers.SGD(1.0, clip_global_norm=0.01)
    optimizer.apply_gradients([(np.array([60000, 0], np.float16), variable)])
    np.testing.assert_allclose(variable, [-0.01, 0], rtol=1e-3)


def test_rows_that_come_several_times_are_added() -> None:
    rows = hs.IndexedSlices(np.arange(8.0).reshape(4, 2), [5, 0, 5, 2], (6, 2))
    merged = merged_rows(rows)
    np.testing.assert_array_equal(merged.indices, [0, 2, 5])
    np.testing.assert_array_equal(merged.values, [[2, 3], [6, 7], [4, 6]])
    np.testing.assert_array_equal(merged.to_dense(), rows.to_dense())
    empty = hs.IndexedSlices(np.zeros((0, 2)), [], (6, 2))
    assert merged_rows(empty).values.shape == (0, 2)


def test_restored_state_of_another_shape_is_refused() -> None:
    variable = hs.Variable(np.zeros(2), name="v")
    optimizer = optimizers.SGD(0.1, 0.9)
    optimizer.checkpoint_defer("momentum/v", np.zeros(3))
    with pytest.raises(ValueError, match="same model"):
        optimizer.build([variable])


def test_regularization_is_a_sum_of_one_replica() -> None:
    assert hs.scale_regularization_loss([[1, 2], [3, 4]]) == 10
    assert hs.scale_regularization_loss(np.float64(0.5)).dtype == np.float64
    assert hs.scale_regularization_loss(np.float16(0.5)).dtype == np.float16
    with hs.OneDeviceStrategy().scope(), pytest.raises(RuntimeError, match="replica"):
        hs.scale_regularization_loss(1.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adagrad", "Adam", "AdamW"])
def test_small_variables_are_updated_as_one_with_the_same_bits(
    kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ml_dtypes  # noqa: F401

    def train(most: int) -> list[bytes]:
        monkeypatch.setattr("hpcstrat.optimizers.routine._SMALL", most)
        draw = np.random.default_rng(5)
        shapes = [(3,), (), (0, 2), (7, 5), (1,), (64,), (2, 3, 4), (33,)]
        variables = [
            hs.Variable(np.array(draw.standard_normal(shape), dtype), name=f"v{index}")
            for index, shape in enumerate(shapes)
        ]
        options: dict[str, Any] = {"clip_global_norm": 3.0, "aggregation": "mean"}
        if kind == "AdamW":
            options["exclude"] = ("v1", "v6")
        optimizer = (
            hs.optimizers.SGD(0.1, 0.9, True, **options)
            if kind == "momentum"
            else getattr(hs.optimizers, kind)(0.1, **options)
        )
        for _ in range(5):
            gradients = [
                np.array(draw.standard_normal(shape), dtype, order="F")
                for shape in shapes
            ]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            # Programs may still assign variables between the steps.
            variables[3].assign(np.full((7, 5), 0.5, dtype))
        state = optimizer.checkpoint_variables()
        routine = optimizer._routine
        assert len(routine.bundles) == (0 if most < 0 else 1 + (kind == "AdamW"))
        assert (routine.flat is not None) == (most > 0)
        return [v.numpy().tobytes() for v in (*variables, *state.values())]

    assert train(64) == train(-1)


def test_a_rule_of_ones_own_over_a_bundled_one_is_called_for_each_variable() -> None:
    seen: list[tuple[int, ...]] = []

    class Own(hs.optimizers.SGD):
        def update(self, step: Any, gradient: Any, value: Any, *slots: Any) -> None:
            seen.append(value.shape)
            super().update(step, gradient, value, *slots)

    variables = [hs.Variable(np.zeros(size), name=f"v{size}") for size in (2, 3)]
    optimizer = Own(0.1)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(v.shape), v) for v in variables])
    assert seen == [(2,), (3,)] * 2


def test_the_optimizer_of_the_guide_accumulates_clips_and_is_restored(
    tmp_path: Path,
) -> None:
    guide = Path(__file__).parents[3] / "docs" / "recipes.md"
    (code,) = (b.code for b in blocks(guide.read_text()) if "RMSProp(hs." in b.code)
    names: dict[str, Any] = {}
    exec(code, names)

    def made() -> tuple[list[hs.Variable], Any]:
        values = [np.arange(1, size + 1, dtype=np.float32) for size in (3, 5)]
        variables = [hs.Variable(v, name=f"w{v.size}") for v in values]
        return variables, names["RMSProp"](0.1, accumulate_steps=2)

    def call(variables: list[hs.Variable], optimizer: Any) -> bool:
        pairs = [(v.value().copy(), v) for v in variables]
        return bool(optimizer.apply_gradients(pairs))

    variables, optimizer = made()
    gradients = [2 * v.numpy() for v in variables]
    before = [v.numpy() for v in variables]
    assert [call(variables, optimizer) for _ in range(2)] == [False, True]
    for variable, gradient, old in zip(variables, gradients, before, strict=True):
        mean = 0.1 * gradient**2
        expected = old - 0.1 * gradient / (np.sqrt(mean) + 1e-7)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
    # Save during an accumulation, whose partial sums are saved, too.
    call(variables, optimizer)
    hs.CheckpointManager(tmp_path, weights=variables, optimizer=optimizer).save()
    others, restored = made()
    hs.CheckpointManager(tmp_path, weights=others, optimizer=restored).restore()
    assert call(others, restored)
    assert call(variables, optimizer)
    for one, other in zip(variables, others, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
