"""A strategy over all ranks; integrations do not depend on layouts of workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mpi.ranks.conftest import folder, job, strategies

__all__ = ["folder", "job", "strategies", "strategy"]


@pytest.fixture(scope="session")
def strategy() -> Iterator[Any]:
    """Yield a strategy, which tests share and must leave usable."""
    import hpcstrat as hs

    with hs.MultiWorkerMirroredStrategy() as strategy:
        yield strategy


@pytest.fixture(scope="session", autouse=True)
def kept_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let JAX keep compiled programs, because tests make the same small models often.

    The folder belongs to this rank, because JAX would read a file that another rank is
    still writing.
    """
    if jax := sys.modules.get("jax"):
        folder = tmp_path_factory.mktemp("compiled")
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
