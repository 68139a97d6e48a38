"""The fit of a heat equation in docs/examples, on replicas of several ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from tests.mpi.ranks.outcomes import assert_same_bits

pytestmark = pytest.mark.rule

PROGRAM = Path(__file__).parents[4] / "docs" / "examples" / "heat_fit.py"
ITERATIONS, RATE = 20, 0.002


class Whole:
    """Stands for `Inside` in one process, with NumPy on whole fields."""

    def part(self, length: int) -> slice:
        return slice(length)

    def sum(self, value: Any) -> Any:
        return value

    def halo(self, field: Any, axis: int, width: int) -> Any:
        assert (axis, width) == (1, 1)
        return np.pad(field, ((0, 0), (1, 1), (0, 0)))

    def halo_adjoint(self, field: Any, axis: int, width: int) -> Any:
        assert (axis, width) == (1, 1)
        return field[:, 1:-1]


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("heat_fit", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    found: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    found.STEPS = 5
    return found


def alone(program: Any) -> tuple[Any, ...]:
    """Return losses, coefficients and first temperature, by NumPy in one process."""
    solver = program.HeatSolver(Whole())
    coefficients, start = np.zeros(4), np.zeros((program.NX, program.NY))
    data = hs.Dataset(program.measurements(), program.BATCH, shuffle=True, seed=3)
    losses = []
    for _, (numbers, measured) in zip(range(ITERATIONS), data.repeat(), strict=False):
        temperatures = solver.solve(coefficients, start, solver.sources(numbers))
        error = temperatures[-1] - measured
        losses.append(0.5 * np.sum(error**2) / program.BATCH)
        slopes = solver.gradients(coefficients, temperatures, error / program.BATCH)
        coefficients, start = (
            value - RATE * slope
            for value, slope in zip((coefficients, start), slopes, strict=True)
        )
    return losses, coefficients, start


def fitted(program: Any, strategy: Any) -> tuple[Any, ...]:
    losses, *found = program.fit(strategy, lambda: hs.optimizers.SGD(RATE), ITERATIONS)
    return losses, *(variable.numpy() for variable in found)


def test_the_fit_is_that_of_one_process(job: Any, program: Any) -> None:
    expected = alone(program)
    for count in range(1, job.size + 1):
        if job.size % count == 0:
            with hs.MultiWorkerMirroredStrategy(ranks_per_replica=count) as strategy:
                found = fitted(program, strategy)
                strategy.check_divergence()
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
            assert_same_bits(job, *found)


def test_logical_replicas_have_the_same_bits_on_any_number_of_replicas(
    job: Any, program: Any
) -> None:
    for count in (1, 2):
        bits = []
        for ranks in range(count, min(job.size, 4 * count) + 1, count):
            part = job.Split(int(job.rank < ranks), job.rank)
            if job.rank < ranks:
                with hs.MultiWorkerMirroredStrategy(
                    comm=part, ranks_per_replica=count, logical_replicas=4
                ) as strategy:
                    found = fitted(program, strategy)
                bits.append(b"".join(np.asarray(a).tobytes() for a in found))
            part.Free()
        assert len(set(bits)) <= 1


def test_the_solver_has_exact_adjoints(job: Any, program: Any) -> None:
    with hs.MultiWorkerMirroredStrategy(ranks_per_replica=job.size) as strategy:
        solver = program.HeatSolver(strategy.inside)
        shape = 2, len(solver.x), program.NY
        hs.testing.check_adjoint(
            solver.laplace, solver.laplace_adjoint, shape, inside=strategy.inside
        )
