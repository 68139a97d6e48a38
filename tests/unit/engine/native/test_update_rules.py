"""The compiled update rules: their results equal NumPy's bit by bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.engine import native
from hpcstrat.optimizers import LAMB, SGD, Adam, AdamW, adam, sgd
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.rules import Step

ROOT = Path(native.__file__).parents[3]
SOURCE = Path(native.__file__).with_name("update_rules.c")
RULES: dict[str, Callable[[], Optimizer]] = {
    "adam": lambda: Adam(0.01, 0.8, 0.99, 1e-3),
    "adamw": lambda: AdamW(0.01, 0.3),
    "lamb": lambda: LAMB(0.01, 0.3),
    "momentum": lambda: SGD(0.1, 0.9),
    "nesterov": lambda: SGD(0.1, 0.9, nesterov=True),
}


@pytest.fixture
def rules() -> ModuleType:
    """Return the compiled rules."""
    found = native.load_update_rules()
    if found is None:
        pytest.skip("the package was built without its update rules")
    return found


def _after(rule: Optimizer, arrays: list[Any], steps: int) -> list[Any]:
    """Return variable and state after steps with the same gradient."""
    gradient, *targets = (array.copy() for array in arrays)
    for number in range(1, steps + 1):
        given = gradient.copy()
        rule.update(Step(0.01, number, "weights"), given, *targets)
    return targets


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from([np.float32, np.float64]),
    size=st.sampled_from([0, 1, 7, 64, 1000, 40_000]),
    seed=st.integers(0, 1000),
)
def test_results_have_the_bits_of_numpy(
    name: str, dtype: type, size: int, seed: int
) -> None:
    if native.load_update_rules() is None:
        pytest.skip("the package was built without its update rules")
    rng, rule = np.random.default_rng(seed), RULES[name]()
    # Draw magnitudes from subnormal numbers to numbers with infinite squares.
    most = 30 if dtype is np.float32 else 200
    scale = 10.0 ** rng.integers(-most, most, size)
    arrays = [(rng.standard_normal(size) * scale).astype(dtype) for _ in range(4)]
    arrays[3] = np.abs(arrays[3])
    arrays = arrays[: 2 + len(rule.state)]
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for module in (adam, sgd):
            patch.setattr(module, "compiled_rules", lambda: None)
        expected = _after(rule, arrays, 3)
        for module in (adam, sgd):
            patch.setattr(module, "compiled_rules", native.load_update_rules)
        found = _after(rule, arrays, 3)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.array_equal(np.signbit(one), np.signbit(other)) or np.isnan(one).any()


FACTORS = (0.9, 0.1, 0.99, 0.01, 0.5, 1e-7, 0.5, 0.01, 1.0)


def test_other_arrays_are_left_as_they_are(rules: ModuleType) -> None:
    memory = np.ones(40, np.float32)
    fine = [np.ones(10, np.float32) for _ in range(4)]
    read_only = np.ones(10, np.float32)
    read_only.flags.writeable = False
    for wrong in (
        np.ones(10),
        np.ones(10, np.float16),
        np.ones(10, np.int32),
        np.ones(10, np.complex64),
        np.ones(10, ">f4"),
        np.ones(9, np.float32),
        memory[::4],
        np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32),
        read_only,
        fine[0],
    ):
        for place in range(1, 4):
            arrays = [*fine[:place], wrong, *fine[place + 1 :]]
            assert not rules.adam(tuple(arrays), FACTORS)
    assert not rules.sgd((memory[:10], memory[5:15], fine[0]), (0.1, 0.9), False)
    assert all((array == 1).all() for array in (*fine, memory))
    assert rules.adam(tuple(fine), FACTORS)
    for few in (fine[:2], [*fine, memory]):
        with pytest.raises(TypeError, match="expected a tuple of"):
            rules.adam(tuple(few), FACTORS)
    with pytest.raises(TypeError):
        rules.adam(tuple(fine), FACTORS[1:])


def test_rules_are_compiled_unless_the_environment_says_no(rules: ModuleType) -> None:
    program = "from hpcstrat.optimizers.rules import compiled_rules as c; print(c())"
    found = {
        value: subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "HPCSTRAT_NATIVE": value, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for value in "01"
    }
    assert found["0"] == "None"
    assert rules.__name__ in found["1"]


_PROGRAM = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import update_rules
factors = (0.9, 0.1, 0.99, 0.01, 0.5, 1e-7, 0.5, 0.01, 1.0)
for size in [*range(70), 16384, 20001]:
    for dtype in "fd":
        arrays = tuple(np.ones(size, dtype) for _ in range(4))
        assert update_rules.adam(arrays, factors)
        assert update_rules.adam(arrays[:3], factors)
        for nesterov in (False, True):
            assert update_rules.sgd(arrays[:3], (-0.1, 0.9), nesterov)
    assert not update_rules.adam((*arrays[:3], arrays[0]), factors) or not size
"""


def test_it_builds_without_warnings_and_runs_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc")
    include = sysconfig.get_path("include")
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover", f"-I{include}"]
    made = str(tmp_path / "update_rules.abi3.so")
    subprocess.run([compiler, *flags, str(SOURCE), "-o", made], check=True)
    library = subprocess.run(
        [compiler, "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        env={
            **os.environ,
            "LD_PRELOAD": library,
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
