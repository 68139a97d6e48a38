"""A warning if the arrays of a data set differ between ranks.

Each replica reads its rows from its own rank's arrays. If these differ, a global batch
consists of rows of different data sets, and some rows are never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.data.file_lists import digest_of, in_list
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.arrays.samples import digest_of_rows, has_plain_bytes
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array, Replicas

__all__ = ["arrays_among", "compare_arrays"]

# A sample of a larger array is compared: few rows, because each may be a page of a
# file that is mapped into memory.
_MOST_BYTES = 1 << 20
_MOST_ROWS = 64


def arrays_among(values: Iterable[Any]) -> list[Array]:
    """Return the NumPy and CuPy arrays among some values."""
    return [v for v in values if isinstance(v, np.ndarray) or is_device(v)]


def compare_arrays(strategy: Replicas, words: str, arrays: Sequence[Array]) -> None:
    """Warn on rank 0 if ranks have arrays with other values, in a sample of rows.

    Collective over all ranks of the strategy, unless there are no arrays. ``words``
    describe the data set; ranks with other descriptions are refused elsewhere.
    """
    if not arrays:
        return
    mark = 0
    for array in arrays:
        if array.ndim and has_plain_bytes(array):
            digest, _ = digest_of_rows(array, _MOST_BYTES, _MOST_ROWS)
            mark = xxh3_64_intdigest(digest.to_bytes(8, "little"), mark)
    ranks = strategy.all_ranks
    gathered = ranks.collectives.all_gather_object(
        (digest_of([words]), mark), "arrays of a data set"
    )
    marks = [found for _, found in gathered]
    is_one_kind = len({description for description, _ in gathered}) == 1
    if ranks.rank or len(set(marks)) == 1 or not is_one_kind:
        return
    # The arrays that most ranks have count as right.
    right = max(set(marks), key=lambda found: (marks.count(found), found == marks[0]))
    others = [rank for rank, found in enumerate(marks) if found != right]
    get_logger("data").warning(
        "expected the same arrays in a data set on all ranks, found other values in %s "
        "on rank%s %s than on rank %d; replicas would read their rows from different "
        "data: load the same data, or seed the random numbers equally, on every rank; "
        "if each rank has rows of its own, use distribute_datasets_from_function, or "
        "the policy AutoShardPolicy.OFF; if the difference is intended, pass "
        "InputOptions(compare_every=0)",
        words,
        "s" if len(others) > 1 else "",
        in_list(others),
        marks.index(right),
    )
