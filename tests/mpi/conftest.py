"""Skip tests that need an MPI launcher on machines without a launcher."""

from __future__ import annotations

import pytest

from hpcstrat.errors import HpcstratError
from hpcstrat.testing.launcher import find_launcher


@pytest.fixture(autouse=True)
def launcher() -> str:
    """Return the path of mpirun, or skip the test if there is no mpirun."""
    try:
        return find_launcher()
    except HpcstratError as exc:
        pytest.skip(str(exc))
