"""Comparison of global batches between workers that each run the program's iterable.

Each worker cuts its replicas' pieces out of its own batch. If workers read batches in
different orders, some rows are used twice, and other rows never. Therefore a hash of
the batch is part of the message that workers exchange in every step anyway. If replicas
consist of several ranks, the ranks of a replica each read batches, and compare them in
the same way, even if workers read different data.

For fields of Python objects, only shapes and types are compared. The same holds for
arrays on GPUs after an iteration's first batch, because a hash of their bytes would
make the host wait for the GPU.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import is_device, to_host
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError

__all__ = ["END", "Sighting", "digest", "explain_difference", "show"]

END = 0
"""Digest of a replica whose data have ended, instead of the digest of a batch."""

Sighting = tuple[int, str, int, str]
"""A batch that was read: replica, reader's name, digest, description of the batch."""

_SHOWN_ARRAYS = 4
_SHOWN_BATCHES = 3
_SHOWN_WORKERS = 8


def digest(batch: Tree, *, on_gpus: bool) -> int:
    """Return a hash (1 to 2**63 - 1) of a batch.

    Without ``on_gpus``, only shapes and dtypes of arrays on GPUs are hashed.
    """
    mark = 0
    for leaf in flatten(batch)[0]:
        # Each hash is the seed of the next one, so the order of leaves matters.
        mark = xxh3_64_intdigest(f"{leaf.dtype}{leaf.shape}".encode(), mark)
        if on_gpus or not is_device(leaf):
            mark = _hashed(to_host(leaf), mark)
    # Keep 63 bits, because the negated hash is also sent as int64; 0 means `END`.
    return mark >> 1 or 1


def _hashed(array: Array, mark: int) -> int:
    dtype = array.dtype
    if dtype.names is not None:
        # Hash each field by itself, because the bytes between fields are undefined.
        for name in dtype.names:
            mark = _hashed(array[name], mark)
        return mark
    # A StringDType array holds pointers to its strings, which differ between processes.
    if dtype.kind == "T":
        return xxh3_64_intdigest(repr(array.tolist()).encode(), mark)
    if dtype.hasobject:
        return mark
    if dtype.char in "gG":
        array = array.astype(np.float64 if dtype.char == "g" else np.complex128)
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return xxh3_64_intdigest(flat, mark)


def show(batch: Tree) -> str:
    """Describe a batch in words: the first row and hash of its first few arrays."""
    leaves = flatten(batch)[0]
    try:
        shown = [_show_array(leaf) for leaf in leaves[:_SHOWN_ARRAYS]]
    # Writing an error's message must not raise another error.
    except Exception as error:
        return f"a batch that cannot be shown ({type(error).__name__})"
    rest = len(leaves) - len(shown)
    return ", ".join(shown) + (f", and {rest} more arrays" if rest else "")


def _show_array(array: Array) -> str:
    text = f"{array.dtype}{list(array.shape)}"
    if len(array):
        row: Any = to_host(array[:1]).reshape(-1)[:8].tolist()
        text += f" with the first row {reprlib.repr(row)}"
    return f"{text} of hash {digest(array, on_gpus=True) >> 31:08x}"


def explain_difference(where: str, sightings: Sequence[Sighting]) -> CollectiveError:
    """Return the error to raise on all replicas; it names workers with other data."""
    groups: dict[int, list[Sighting]] = {}
    for sighting in sightings:
        groups.setdefault(sighting[2], []).append(sighting)
    told = []
    for mark, group in list(groups.items())[:_SHOWN_BATCHES]:
        numbers = ", ".join(worker for _, worker, _, _ in group[:_SHOWN_WORKERS])
        name = f"worker{'s' if len(group) > 1 else ''} {numbers}"
        name += ", ..." if len(group) > _SHOWN_WORKERS else ""
        told.append(f"{name}: {group[0][3]} (in all {mark:016x})")
    if len(groups) > _SHOWN_BATCHES:
        told.append(f"{len(groups) - _SHOWN_BATCHES} other batches")
    # The batch that most workers have counts as right.
    most = max(groups.values(), key=len)
    pairs = {(replica, mark) for replica, _, mark, _ in sightings}
    if len(pairs) > len({replica for replica, _ in pairs}):
        among, ways = "all ranks of a replica", "or use hpcstrat.Dataset"
    else:
        among = "every worker"
        ways = (
            "use hpcstrat.Dataset, let each worker read its own part with "
            "distribute_datasets_from_function, or let one pipeline read for all "
            "workers with InputOptions(single_pipeline=True)"
        )
    return CollectiveError(
        f"expected the iterable to return the same batches on {among}, found in "
        f"{where}, counted from 0, {' / '.join(told)}; seed the random numbers of the "
        f"iterable equally on every rank, {ways}; if batches differ only by rounding, "
        "on hosts of different kinds, use InputOptions(compare_every=0)",
        [sighting[0] for sighting in sightings if sighting not in most],
    )
