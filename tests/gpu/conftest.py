"""The fixtures of the rank tests, for tests with arrays on GPUs."""

from __future__ import annotations

import os

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

# Of the stand-in; with CuPy itself, the machine has what it has.
os.environ.setdefault("HPCSTRAT_STANDIN_DEVICES", "4")

__all__ = [
    "folder",
    "job",
    "kept_strategies",
    "make_strategy",
    "pytest_collection_modifyitems",
    "pytest_generate_tests",
    "short_spins",
    "strategies",
    "strategy",
    "topology",
]
