"""Random sequences of calls of every kind, compared with NumPy; see tests/fuzz/calls.

The sequences have calls in which a rank makes a mistake, strategies of groups of ranks,
and strategies without the compiled kernel.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.calls.session import Session
from tests.mpi.ranks.effort import examples, seeds


@pytest.mark.parametrize("seed", seeds(9))
def test_random_calls_do_what_numpy_says(
    make_strategy: Any, job: Any, seed: int
) -> None:
    session = Session(job, make_strategy, seed, 0)
    session.run(examples(150))
    session.close()
    problems = [text for texts in job.allgather(session.problems) for text in texts]
    assert not problems, "\n".join(problems[:5])
