"""Tests with arrays on GPUs are skipped only if the GPUs cannot run them."""

from __future__ import annotations

import pytest

from tests.gpu.jobs import why_not


@pytest.mark.parametrize(
    ("transport", "n", "gpus", "left_out"),
    [
        ("nccl", 1, 1, ""),
        ("nccl", 2, 1, "NCCL needs a GPU for each of 2 ranks, found 1"),
        ("nccl", 4, 4, ""),
        ("mpi", 2, 4, "needs an MPI that reads the memory of GPUs"),
        ("host", 4, 1, ""),
    ],
)
def test_the_number_of_gpus_decides(
    transport: str, n: int, gpus: int, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPCSTRAT_MPI_READS_GPU", raising=False)
    reason = why_not(transport, n, gpus)
    assert reason.startswith(left_out)
    assert bool(reason) == bool(left_out)


def test_mpi_is_given_the_memory_of_gpus_where_the_developer_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HPCSTRAT_MPI_READS_GPU", "yes")
    assert not why_not("mpi", 2, 1)
