"""Optimizer state belongs to variables; names are only for files."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat import optimizers
from hpcstrat.optimizers.slots import file_names, spellings, unescaped


def variable(name: str | None = None, *shape: int) -> Any:
    return hs.Variable(np.zeros(shape or (1,)), name=name)


def step(optimizer: Any, gradient: float, to: Any) -> None:
    optimizer.apply_gradients([(np.full(to.shape, gradient), to)])


@pytest.mark.parametrize("steps", [1, 2])
def test_variables_of_one_name_have_state_of_their_own(steps: int) -> None:
    a, b = variable(), variable()
    optimizer = optimizers.SGD(1.0, 0.5, accumulate_steps=steps)
    for _ in range(2 * steps):
        # Update one variable per call, so that an accumulation covers both.
        step(optimizer, 1.0, a)
    for _ in range(2 * steps):
        step(optimizer, -2.0, b)
    # The velocities are 1 and 1.5, times the number of calls in a step.
    np.testing.assert_array_equal(a, [-2.5 * steps])
    np.testing.assert_array_equal(b, [5.0 * steps])


def test_state_of_variables_of_one_name_is_refused_at_the_save(tmp_path: Path) -> None:
    a, b = variable(), variable()
    optimizer = optimizers.SGD(1.0, 0.5)
    manager = hs.CheckpointManager(tmp_path, a=a, b=b, optimizer=optimizer)
    step(optimizer, 1.0, a)
    manager.save(1)
    step(optimizer, 1.0, b)
    with pytest.raises(ValueError, match=r"momentum of several .*'Variable'.*name="):
        manager.save(2)
    # Names do not matter for an optimizer without state.
    plain = optimizers.SGD(1.0)
    step(plain, 1.0, a)
    step(plain, 1.0, b)
    hs.CheckpointManager(tmp_path / "plain", a=a, b=b, optimizer=plain).save()


def test_state_goes_with_its_variable(tmp_path: Path) -> None:
    optimizer = optimizers.Adam(0.1, accumulate_steps=2)
    for number in range(20):
        # A variable at a reused memory address must be treated as a new variable.
        fresh = variable("w")
        step(optimizer, 1.0, fresh)
        step(optimizer, 1.0, fresh)
        np.testing.assert_allclose(fresh, [-0.1 * _correction(number)], rtol=1e-6)
    assert len(optimizer._slots._owned) == 1
    hs.CheckpointManager(tmp_path, optimizer=optimizer).save()
    optimizer._routine = None
    del fresh
    gc.collect()
    assert not optimizer._slots._owned
    assert set(optimizer.checkpoint_variables()) == {"iterations", "accumulated_steps"}


def _correction(number: int) -> float:
    """Return the first Adam step, with the bias correction of a later step."""
    t = number + 1
    first = 0.1 * 2 / (1 - 0.9**t)
    return float(first / (np.sqrt(0.001 * 4 / (1 - 0.999**t)) + 1e-7))


def test_copies_take_the_state_to_variables_of_the_same_names() -> None:
    results = []
    for copied in (False, True):
        names = ("v", "w")
        variables = [variable(name) for name in names]
        optimizer = optimizers.SGD(1.0, 0.5, accumulate_steps=2)
        pairs = [(np.ones(1) * (n + 1), v) for n, v in enumerate(variables)]
        for _ in range(3):
            optimizer.apply_gradients(pairs)
        if copied:
            optimizer, variables = copy.deepcopy((optimizer, variables))
        pairs = [(np.ones(1), v) for v in variables]
        for _ in range(3):
            optimizer.apply_gradients(pairs)
        results.append([v.numpy() for v in variables])
    np.testing.assert_array_equal(*results)


NAMES = ["dense", "dense/bias", "dense/bias/x", "a//b", "..", "x%2Fy", "x/y", "u.v"]


def test_every_name_has_a_place_of_its_own_in_files() -> None:
    names = [f"kind/{name}" for name in NAMES]
    found = file_names([*names, "alone"])
    assert found[-1] == "alone"
    for name, given in zip(names, found, strict=False):
        assert unescaped(given) == name
        assert given in spellings(name)
        parts = given.split("/")
        heads = {"/".join(parts[:count]) for count in range(1, len(parts))}
        assert not heads & set(found)
        assert not {"", ".", ".."} & set(parts)
    # The names are those of older files, if that is possible.
    assert [n for n, f in zip(names, found, strict=False) if n == f] == [
        "kind/dense",
        "kind/x/y",
        "kind/u.v",
    ]
    assert file_names(["kind/dense/bias"]) == ["kind/dense/bias"]


@pytest.mark.parametrize("built", [False, True])
def test_variables_within_the_name_of_another_are_saved(
    tmp_path: Path, built: bool
) -> None:
    def program() -> tuple[list[Any], Any, Any]:
        variables = [variable(name) for name in NAMES]
        optimizer = optimizers.SGD(1.0, 0.5)
        objects = {"model": variables, "optimizer": optimizer}
        return variables, optimizer, hs.CheckpointManager(tmp_path, **objects)

    def train(variables: list[Any], optimizer: Any) -> list[Any]:
        pairs = [(np.ones(1) * n, v) for n, v in enumerate(variables, 1)]
        optimizer.apply_gradients(pairs)
        return [v.numpy() for v in variables]

    variables, optimizer, manager = program()
    train(variables, optimizer)
    manager.save()
    wanted = train(variables, optimizer)
    variables, optimizer, manager = program()
    if built:
        optimizer.build(variables)
    manager.restore()
    # Restored state whose variables do not exist yet is saved unchanged.
    manager.save(7)
    manager.restore()
    np.testing.assert_array_equal(train(variables, optimizer), wanted)


@pytest.mark.parametrize("built", [False, True])
def test_old_names_are_found(tmp_path: Path, built: bool) -> None:
    # Only one variable had state in this file, so that its name there differs from now.
    bias = variable("dense/bias")
    optimizer = optimizers.SGD(1.0, 0.5)
    step(optimizer, 1.0, bias)
    path = hs.CheckpointManager(tmp_path, bias=bias, optimizer=optimizer).save()
    with h5py.File(path) as file:
        assert "optimizer/momentum/dense/bias" in file
    bias, dense = variable("dense/bias"), variable("dense")
    optimizer = optimizers.SGD(1.0, 0.5)
    if built:
        optimizer.build([bias])
    manager = hs.CheckpointManager(tmp_path, bias=bias, optimizer=optimizer)
    manager.restore()
    step(optimizer, 1.0, dense)
    manager.save(5)
    optimizer = optimizers.SGD(1.0, 0.5)
    hs.CheckpointManager(tmp_path, bias=bias, optimizer=optimizer).restore()
    step(optimizer, 1.0, bias)
    np.testing.assert_array_equal(bias, [-2.5])
