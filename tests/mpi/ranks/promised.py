"""The order of additions that hpcstrat promises, computed in one process.

Random numbers have sums that depend on the order. `assert_promised` compares the bits;
a failure says the array, the pieces and the algorithm once for all ranks that found the
same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import hpcstrat as hs
from hpcstrat.engine.calls.replica_collectives import Collectives
from tests.unit.kernel_sums import ORDERED, TYPES, drawn, extreme, same_bits

__all__ = [
    "FLOATS",
    "assert_promised",
    "assert_random_calls",
    "difference",
    "in_order",
    "promised",
    "random_terms",
    "reduced_by",
    "workers_of",
]

FLOATS = [*(np.dtype(code) for code in "fdeFD"), np.dtype(ml_dtypes.bfloat16)]


def workers_of(strategy: Any, job: Any) -> list[int]:
    """Return the worker of each rank; collective over the job."""
    workers: list[int] = job.allgather(strategy.topology.worker_id)
    return workers


def random_terms(seed: int, size: int, length: int, dtype: Any) -> list[Any]:
    """Return an array for each replica, the same on every rank."""
    draw = random.Random(seed)
    return [drawn(draw, np.dtype(dtype), length) for _ in range(size)]


def in_order(terms: Sequence[Any], function: np.ufunc = np.add) -> Any:
    """Combine arrays one after the other."""
    total = terms[0]
    with np.errstate(all="ignore"):
        for term in terms[1:]:
            total = function(total, term)
    return total


def promised(terms: Sequence[Any], op: str, workers: Sequence[int] = ()) -> Any:
    """Return the result of a reduction of all replicas' arrays.

    The values of each worker are added in the order of its replicas, and then the sums
    of the workers in their order. ``workers`` has the worker of each replica; without
    it, all are on one. Halves are added in float32, and rounded once.
    """
    dtype = terms[0].dtype
    if op in ("max", "min"):
        return extreme(terms, op.upper()) if len(terms) > 1 else terms[0]
    wide, result = dtype, dtype
    if dtype.itemsize == 2 and dtype.kind not in "iu":
        wide = np.dtype(np.float32)
    elif dtype.kind in "iu" and op == "mean":
        wide = result = np.dtype(np.float64)
    by_worker: dict[int, list[Any]] = {}
    for worker, term in zip(workers or [0] * len(terms), terms, strict=True):
        with np.errstate(all="ignore"):
            by_worker.setdefault(worker, []).append(term.astype(wide))
    total = in_order([in_order(by_worker[worker]) for worker in sorted(by_worker)])
    with np.errstate(all="ignore"):
        if op == "mean":
            total = total / wide.type(len(terms))
        return np.asarray(total).astype(result)


def difference(found: Any, wanted: Any) -> str:
    """Say how an array differs from another; return an empty text if it does not.

    Payloads of NaN do not count.
    """
    found, wanted = np.asarray(found), np.asarray(wanted)
    if same_bits(found, wanted):
        return ""
    name = f"{wanted.dtype}{list(wanted.shape)}"
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return f"{name} became {found.dtype}{list(found.shape)}"
    rows = [
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)
        for array in (found, wanted)
    ]
    nans = (found != found) & (wanted != wanted)
    wrong = np.flatnonzero((rows[0] != rows[1]).any(axis=1) & ~nans.reshape(-1))
    first = np.unravel_index(wrong[0], wanted.shape)
    place = list(map(int, first))
    return (
        f"{name}: {len(wrong)} of {wanted.size} elements differ, the first at {place}: "
        f"{found[first]!r} instead of {wanted[first]!r}"
    )


def assert_promised(
    job: Any, pairs: Sequence[tuple[Any, Any]], by: str, piece: int = 0
) -> None:
    """Compare results with the promised ones; all ranks raise the same error.

    ``pairs`` are results and promised results; ``by`` names the algorithm, and
    ``piece`` is the size of its pieces in bytes, or 0 for the default.
    """
    own = next(filter(None, (difference(*pair) for pair in pairs)), "")
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(job.allgather(own)):
        if text:
            ranks.setdefault(text, []).append(rank)
    size = f"pieces of {piece} bytes" if piece else "pieces of the default size"
    said = [f"on ranks {some} {text}" for text, some in ranks.items()]
    assert not said, f"{by}, in {size}: {'; '.join(said)}"


def reduced_by(
    strategy: Any,
    ops: Any,
    op: str,
    value: Any,
    *,
    piece: int = 0,
    started: bool = False,
) -> Any:
    """Reduce a value by an algorithm, in pieces of a size; collective."""
    options = hs.CommunicationOptions(bytes_per_pack=piece)
    collectives = Collectives(strategy.collectives.channel, ops, options)
    kind, what = hs.ReduceOp.parse(op), "promised"
    if started:
        return collectives.start_reduce(kind, value, what).wait()
    return collectives.batch_reduce(kind, value, what)


def assert_random_calls(
    job: Any, strategy: Any, shared: np.random.Generator, *, by: str
) -> None:
    """Reduce random arrays by random operations, in all ways to pass their memory.

    ``shared`` is in the same state on all ranks.
    """
    workers = workers_of(strategy, job)
    for _ in range(12):
        op = ["sum", "mean", "max", "min"][shared.integers(4)]
        types = TYPES if op in ("sum", "mean") else ORDERED
        trees = _random_trees(shared, job.size, types)
        piece = int(shared.choice([0, 4096, 65536]))
        way = int(shared.integers(3)) if op != "mean" else 0
        arrays, out, times = trees[job.rank], None, 1
        if way:
            arrays = out = [array.copy() for array in arrays]
        if way == 2:
            # Some results overwrite the values of other arrays.
            more, times = [array.copy() for array in arrays], 2
            arrays, out = [*arrays, *more], [*more, *arrays]
        found: list[Any] = []

        def reduce(op: Any = op, given: Any = (arrays, out, piece, found)) -> None:
            arrays, out, piece, found = given
            options = hs.CommunicationOptions(bytes_per_pack=piece)
            context = hs.get_replica_context()
            found.extend(context.all_reduce(op, arrays, options, out=out))

        strategy.run(reduce)
        wanted = [promised(terms, op, workers) for terms in zip(*trees, strict=True)]
        pairs = list(zip(found, wanted * times, strict=True))
        assert_promised(job, pairs, f"{op} by {by}", piece)


def _random_trees(
    shared: np.random.Generator, size: int, types: Sequence[Any]
) -> list[list[Any]]:
    """Return a list of arrays for each replica, with equal types and shapes."""
    trees: list[list[Any]] = [[] for _ in range(size)]
    for _ in range(int(shared.integers(1, 8))):
        dtype = types[int(shared.integers(len(types)))]
        most = 200_000 if shared.random() < 0.1 else 300
        rows, columns = (int(n) for n in shared.integers(0, [most, 4]))
        shape = [(), (rows,), (rows, columns)][int(shared.integers(3))]
        form, seed = int(shared.integers(4)), int(shared.integers(1 << 30))
        terms = random_terms(seed, size, int(np.prod(shape)), dtype)
        for tree, term in zip(trees, terms, strict=True):
            array = term.reshape(shape)
            if form == 0:
                array = np.asfortranarray(array)
            elif form == 1 and shape:
                array = np.repeat(array, 2, axis=0)[::2]
            tree.append(array)
    return trees
