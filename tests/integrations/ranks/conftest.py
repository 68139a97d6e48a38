"""A strategy over all ranks: integrations see no layouts, and one says it all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.mpi.ranks.conftest import folder, job, strategies

__all__ = ["folder", "job", "strategies", "strategy"]


@pytest.fixture(scope="session")
def strategy() -> Iterator[Any]:
    """Yield a strategy, which tests share and leave usable."""
    import hpcstrat as hs

    with hs.MultiWorkerMirroredStrategy() as strategy:
        yield strategy
