"""`check_equal`: compares values, other than variables, between replicas.

The values are arrays of any library, numbers and texts. (Variables of a strategy are
checked by `hpcstrat.safety.divergence.copies`.) If all values are equal, a check costs
one exchange of headers and one allreduce of 16 bytes.
"""

from __future__ import annotations

import itertools
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import as_array
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Replicas, Tree
from hpcstrat.errors import DivergenceError
from hpcstrat.safety.divergence.first_difference import (
    REPLICAS,
    digest_of,
    first_difference,
    most_common,
)

__all__ = ["check_equal"]

_WHAT = "check_equal"
_ADVICE = (
    "give all replicas the value of one, as strategy.broadcast_object does, or compute "
    "it in the same way on all, from the same seed"
)
# Matches an address in the text of an object, which differs between processes.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class _ComparedLeaf:
    """A part of a leaf to compare: all of it, or one field of structured elements."""

    leaf: int
    field: str
    # Type and shape of an array; type and value of a leaf that is no array.
    kind: str
    digest: int
    array: Array | None = None


def check_equal(strategy: Replicas, tree: Tree) -> None:
    """Raise an error on every replica if the tree's values differ between replicas.

    Collective over the strategy's replicas. See `Strategy.check_equal`.
    """
    parts: list[_ComparedLeaf] = []
    try:
        tree = strategy.local_value(tree)
        leaves, structure = flatten(tree)
        for index, leaf in enumerate(leaves):
            parts += _parts(tree, index, leaf)
        containers = _ADDRESS.sub("", str(structure))
    except Exception as error:
        strategy.collectives.fail(_WHAT, error)
        raise
    if strategy.num_ranks == 1:
        return
    signature = repr((containers, [(p.kind, p.digest) for p in parts]))
    own = xxh3_64_intdigest(signature.encode(errors="replace")) >> 1
    # One allreduce with MAX computes the maximum and the negated minimum of the
    # digests. If the sum of both is 0, all digests are equal.
    extremes = np.array([own, -own], np.int64)
    strategy.collectives.barrier(_WHAT)
    with strategy.collectives.moving(_WHAT) as comm:
        comm.Allreduce(comm.mpi.IN_PLACE, extremes, op=comm.mpi.MAX)
        found = None
        if extremes.sum():
            found = _difference(comm, tree, containers, parts)
    if found is not None:
        raise found


def _parts(tree: Tree, index: int, leaf: Any) -> Iterator[_ComparedLeaf]:
    """Yield the parts of a leaf to compare."""
    scalar = isinstance(leaf, (str, bytes, type(None), *_NUMBERS))
    if scalar and not isinstance(leaf, np.generic):
        kind = f"{type(leaf).__name__} {leaf!r:.60}"
        yield _ComparedLeaf(index, "", kind, xxh3_64_intdigest(_bytes_of(leaf)))
        return
    try:
        kind, array = _array_of(leaf)
    except Exception as error:
        states = hasattr(leaf, "state_dict")
        advice = "pass its state_dict()" if states else "leave it out"
        raise ValueError(
            f"expected arrays, numbers and texts to compare, found a "
            f"{type(leaf).__qualname__} as {_path(tree, index)}: {error}; {advice}"
        ) from error
    if isinstance(leaf, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(leaf)
        yield _ComparedLeaf(
            index, ".mask", f"mask{list(mask.shape)}", digest_of(mask), mask
        )
        nothing: Any = np.zeros((), leaf.dtype)[()]
        array = leaf.filled(nothing)
    for field, values in _fields("", array):
        text = f"{values.dtype}{list(values.shape)}" if field else kind
        yield _ComparedLeaf(index, field, text, digest_of(values), values)


def _array_of(leaf: Any) -> tuple[str, Array]:
    """Return type and shape of a leaf as text, and its values as a NumPy array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        plain = leaf.detach().cpu().resolve_conj().resolve_neg()
        words = f"{leaf.dtype}{list(leaf.shape)}"
        try:
            return words, plain.numpy()
        except (TypeError, RuntimeError):
            # NumPy does not have this type, such as bfloat16: use its bits as integers.
            bits = getattr(torch, f"int{8 * leaf.element_size()}")
            return words, plain.view(bits).numpy()
    array = leaf if isinstance(leaf, np.ndarray) else as_array(leaf)
    if array.dtype.hasobject:
        raise ValueError(f"its elements are references, of {array.dtype}")
    return f"{array.dtype}{list(array.shape)}", array


def _fields(name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """Yield the name and array of each field, without padding between the fields."""
    if array.dtype.names is None:
        yield name, array
        return
    for field in array.dtype.names:
        yield from _fields(f"{name}[{field!r}]", array[field])


def _bytes_of(value: Any) -> bytes:
    """Return the exact bytes of a number or text, including the bits of a NaN."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text.encode(errors="surrogatepass")


def _path(tree: Tree, leaf: int) -> str:
    """Return the path of a leaf as Python code, such as ``tree['a'][0]``."""
    return optree.tree_accessors(tree, none_is_leaf=True)[leaf].codify("tree")


@dataclass(frozen=True, slots=True)
class _Described:
    """A part's description, which ranks exchange to find the first difference."""

    path: str
    kind: str
    digest: int
    # None for a leaf that is no array, whose value is in ``kind``.
    shape: tuple[int, ...] | None


def _difference(
    comm: Any, tree: Tree, containers: str, parts: Sequence[_ComparedLeaf]
) -> DivergenceError | None:
    """Return an error for the first part that differs, or None; collective."""
    own = [
        _Described(
            path=_path(tree, part.leaf) + part.field,
            kind=part.kind,
            digest=part.digest,
            shape=None if part.array is None else part.array.shape,
        )
        for part in parts
    ]
    found: list[tuple[str, list[_Described]]] = comm.allgather((containers, own))
    columns = list(itertools.zip_longest(*[entries for _, entries in found]))
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if differing:
        first = differing[0]
        array = parts[first].array if first < len(parts) else None
        return _error(comm, columns[first], array, len(differing) - 1)
    structures = [structure for structure, _ in found]
    if len(set(structures)) == 1:
        return None
    reference, ranks = most_common(structures)
    return DivergenceError(
        "expected trees of the same structure on all replicas, found "
        f"{structures[ranks[0]]:.150} on {REPLICAS.names(ranks)}, "
        f"{structures[reference]:.150} on replica {reference}; {_ADVICE}",
        ranks,
        "tree",
    )


def _error(
    comm: Any, column: Sequence[_Described | None], array: Array | None, more: int
) -> DivergenceError:
    """Return an error for one part that differs; collective over ``comm``."""
    reference, ranks = most_common(column)
    usual, odd = column[reference], column[ranks[0]]
    path = next(entry.path for entry in (usual, odd) if entry is not None)
    element: tuple[int, ...] = ()
    if usual is None or odd is None or usual.path != odd.path:
        there, here = (e and f"{e.kind} as {e.path}" for e in (odd, usual))
    elif usual.kind != odd.kind or usual.shape is None:
        there, here = odd.kind, usual.kind
    else:
        there = here = None
    if there or here:
        text = (
            f"found {there or 'nothing'} on {REPLICAS.names(ranks)}, "
            f"{here or 'nothing'} on replica {reference}"
        )
    else:
        shape: Any = usual and usual.shape
        text, element = first_difference(comm, array, shape, reference, ranks)
    others = f", and that {more} more leaves differ" if more else ""
    return DivergenceError(
        f"expected {path} to be equal on all replicas, {text}{others}; {_ADVICE}",
        ranks,
        path,
        element,
    )
