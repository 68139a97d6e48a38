"""The fixtures of the rank tests, for tests with arrays on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hpcstrat.engine.gpu.transports import nccl_trial
from tests.mpi.ranks.conftest import (
    folder,
    job,
    kept_strategies,
    make_strategy,
    pytest_collection_modifyitems,
    pytest_generate_tests,
    short_spins,
    strategies,
    strategy,
    topology,
)

# Devices of the stand-in; CuPy itself uses the machine's GPUs.
os.environ.setdefault("HPCSTRAT_STANDIN_DEVICES", "4")


@pytest.fixture(autouse=True, scope="session")
def short_trial() -> Iterator[None]:
    """Skip the largest sum of NCCL's trial, because the tests make many strategies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl_trial, "_TRIAL_BYTES", (4, 1 << 20))
        yield


__all__ = [
    "folder",
    "job",
    "kept_strategies",
    "make_strategy",
    "pytest_collection_modifyitems",
    "pytest_generate_tests",
    "short_spins",
    "short_trial",
    "strategies",
    "strategy",
    "topology",
]
