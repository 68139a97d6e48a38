"""Pretend nodes, each with a folder of its own in the memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.ranks.checkpoint.node_memory.pretend_nodes import Nodes


@pytest.fixture
def nodes(job: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    made = tempfile.mkdtemp(dir="/dev/shm") if job.rank == 0 else None
    root = Path(job.bcast(made))
    yield Nodes(root, job, monkeypatch)
    job.Barrier()
    if job.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
