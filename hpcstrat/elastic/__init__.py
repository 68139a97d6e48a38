"""Training that continues after the loss of a rank, by a spare rank or without it.

`hpcstrat.elastic.run` needs ``mpirun --with-ft ulfm`` of Open MPI 5.
"""

from __future__ import annotations

from hpcstrat.elastic.memory import Memory
from hpcstrat.elastic.running import run

__all__ = ["Memory", "run"]
