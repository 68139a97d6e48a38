"""No order of loads and stores lets a rank read stale data, except in wrong designs."""

from __future__ import annotations

import pytest

from tests.unit.memory_model import Design, find_error


@pytest.mark.parametrize(
    "design",
    [
        Design(2, 5),
        Design(2, 5, scattered=True),
        Design(3, 2),
        Design(3, 1, scattered=True),
        pytest.param(Design(3, 2, scattered=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_order_reads_a_stale_piece(design: Design) -> None:
    assert not find_error(design)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "wrong", [{"releases": False}, {"waits": False}, {"places": 2}, {"places": 1}]
)
def test_wrong_designs_are_found(wrong: dict[str, int], scattered: bool) -> None:
    error = find_error(Design(2, 5, scattered=scattered, **wrong))  # type: ignore[arg-type]
    assert "wants" in error
