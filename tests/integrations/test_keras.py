"""Run the rank tests of Keras' integration, with each backend in jobs of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcstrat import testing

HERE = Path(__file__).parent
FILES = sorted(map(str, HERE.glob("ranks/check_keras_*.py")))
pytestmark = pytest.mark.framework("keras")

# PyTorch, which compiles nothing, runs all of them on two ranks. Elsewhere what the
# backends do each in their way.
CHOSEN = {
    ("torch", 2): "",
    ("jax", 2): "fit_is or infinite or goes_on or in_a_scope_is or data_of_fit",
    ("tensorflow", 2): "fit_is or own or infinite or mask or of_all or goes_on "
    "or in_a_scope_is or data_of_fit",
}


# Logical replicas come after other tests, with whose threads XLA and TensorFlow stay.
ENVIRONMENT = {"NPROC": "1", "TF_NUM_INTRAOP_THREADS": "1"}


def _cases() -> list[object]:
    backends = "torch", "jax", "tensorflow"
    return [
        *[pytest.param(*key, words) for key, words in CHOSEN.items()],
        *[
            pytest.param(backend, n, "", marks=pytest.mark.full)
            for backend in backends
            for n in (1, 2, 3)
            if CHOSEN.get((backend, n), "some")
        ],
    ]


@pytest.mark.parametrize(("backend", "n", "words"), _cases())
def test_rank_tests_pass(backend: str, n: int, words: str) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    chosen = ["-k", words] if words else []
    command = [sys.executable, "-m", "tests.mpi.ranks", "--color=no", *chosen, *FILES]
    env = ENVIRONMENT | {"KERAS_BACKEND": backend}
    finished = testing.launch(n, command, timeout=600, env=env)
    print(finished.stdout)
    print(finished.stderr, file=sys.stderr)
    assert finished.returncode == 0, "a rank test failed; see the report below"


def test_the_library_loads_keras_only_when_asked() -> None:
    program = (
        "import sys, hpcstrat as hs; hs.ReduceOp; assert 'keras' not in sys.modules; "
        "import hpcstrat.integrations.frameworks; assert 'keras' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
