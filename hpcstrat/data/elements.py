"""Elements of a data set: trees of arrays, their stacking, their shapes and dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from hpcstrat.engine.arrays.kinds import array_module, as_array
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = [
    "ArraySpec",
    "CallIterator",
    "as_element",
    "batched_spec",
    "call_program",
    "call_with",
    "code_words",
    "made_spec",
    "merged_spec",
    "name_of",
    "only_shape",
    "pad_and_stack",
    "probed",
    "require_same_structure",
    "row_of",
    "spec_of",
    "stack",
    "writable",
]

_PROBED = 3
_MOST_PROBED = 10


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of an array in the elements of a data set.

    Parameters
    ----------
    shape : tuple of int or None, or None
        None instead of a length or of the shape means that it differs between elements.
    dtype : dtype
        NumPy's dtype.
    """

    shape: tuple[int | None, ...] | None
    dtype: Any

    def __repr__(self) -> str:
        """Return the spec as text, in the format of tf.TensorSpec."""
        return f"ArraySpec(shape={self.shape}, dtype={self.dtype})"


class CallIterator(Iterator[Tree]):
    """An iterator over the results of ``step()``, until ``step`` raises StopIteration.

    Unlike a generator, this iterator can continue after another error in ``step``.
    """

    def __init__(self, step: Callable[[], Tree]) -> None:
        self._step = step

    def __next__(self) -> Tree:
        return self._step()


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, which ranks compare in place of the function."""
    name: str = getattr(function, "__qualname__", type(function).__name__)
    return name


def code_words(function: Callable[..., Any]) -> str:
    """Return the name of a function, and a hash of its own code, as text.

    Captured values are left out, because they may differ between ranks.
    """
    name = name_of(function).rpartition(".")[2]
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    # A set has another order in each process; other code has another address.
    constants = [
        sorted(map(repr, each)) if isinstance(each, frozenset) else each
        for each in code.co_consts
        if not hasattr(each, "co_code")
    ]
    text = f"{code.co_code!r}{code.co_names}{constants}"
    return f"{name} {xxh3_64_hexdigest(text.encode())[:8]}"


def as_element(value: Any) -> Tree:
    """Return a value with arrays as leaves; lists become arrays, as in tf.data."""
    if isinstance(value, dict):
        return type(value)({key: as_element(part) for key, part in value.items()})
    if isinstance(value, tuple):
        parts = [as_element(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    return as_array(value)


def call_with(function: Callable[..., Any], element: Tree, **options: Any) -> Any:
    """Call a function with an element; items of a tuple become arguments."""
    arguments = element if type(element) is tuple else (element,)
    return call_program(function, *arguments, **options)


def call_program(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of the program; raise RuntimeError in place of StopIteration.

    Otherwise a StopIteration of the function would end the data early (see PEP 479).
    """
    try:
        return function(*args, **options)
    except (StopIteration, GeneratorExit) as error:
        raise RuntimeError(
            f"expected a result or an error from {name_of(function)}, found that it "
            f"raised {type(error).__name__}, which would end the data early; raise "
            "another error in it, or call next() with a default"
        ) from error


def row_of(block: Tree, index: int) -> Tree:
    """Return element ``index`` of stacked elements."""
    return tree_map(lambda leaf: leaf[index], block)


def stack(elements: Sequence[Tree]) -> Tree:
    """Stack elements along a new first dimension; ValueError if their shapes differ."""
    leaves, structure = _leaves_of_all(elements)
    return unflatten(structure, [_stacked(column) for column in leaves])


def _leaves_of_all(elements: Sequence[Tree]) -> tuple[list[tuple[Any, ...]], Any]:
    flat = [flatten(element) for element in elements]
    structure = flat[0][1]
    for _, other in flat[1:]:
        if other != structure:
            raise ValueError(
                f"expected elements of one structure in a batch, found {structure} and "
                f"{other}; return the same structure for every element"
            )
    return list(zip(*(leaves for leaves, _ in flat), strict=True)), structure


def _stacked(column: Sequence[Any]) -> Array:
    shapes = {np.shape(leaf) for leaf in column}
    if len(shapes) > 1:
        found = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise ValueError(
            f"expected elements of one shape in a batch, found {found}; use "
            "padded_batch, or cut them to one shape by map"
        )
    stacked: Array = array_module(column[0]).stack(column)
    return stacked


def pad_and_stack(elements: Sequence[Tree], shapes: Tree, values: Tree) -> Tree:
    """Pad the arrays of elements to the longest, or to given shapes, and stack them.

    ``shapes`` and ``values`` (to pad with) have the elements' structure, or are None.
    Raises ValueError if an array is longer than its given shape.
    """
    columns, structure = _leaves_of_all(elements)
    wanted = _per_leaf(shapes, structure, len(columns), is_shape=True)
    fills = _per_leaf(values, structure, len(columns), is_shape=False)
    padded = [
        _padded(column, shape, fill)
        for column, shape, fill in zip(columns, wanted, fills, strict=True)
    ]
    return unflatten(structure, padded)


def _per_leaf(given: Any, structure: Any, count: int, *, is_shape: bool) -> list[Any]:
    """Return the given shape or padding value of each leaf; None for a default."""
    if given is None:
        return [None] * count
    if count == 1 and (is_shape or not isinstance(given, (tuple, list, dict))):
        return [only_shape(given) if is_shape else given]
    if not is_shape and not isinstance(given, (tuple, list, dict)):
        return [given] * count
    parts = list(given)
    if isinstance(given, dict):
        parts = [given[key] for key in sorted(given)]
    if len(parts) != count:
        raise ValueError(
            f"expected padding for each of {count} arrays of an element, found "
            f"{len(parts)}; give it in the structure {structure}"
        )
    return parts


def only_shape(shapes: Any) -> Any:
    """Return the shape of an element's only array: ``(3,)`` for ``((3,),)``."""
    while len(shapes) == 1 and isinstance(shapes[0], (tuple, list)):
        shapes = shapes[0]
    return shapes


def _padded(column: Sequence[Any], wanted: Any, fill: Any) -> Array:
    ranks = {np.ndim(leaf) for leaf in column}
    if len(ranks) > 1:
        raise ValueError(
            "expected arrays of one number of dimensions in a padded batch, found "
            f"{sorted(ranks)}; give all the same"
        )
    if ranks == {0}:
        return _stacked(column)
    longest = [
        max(lengths) for lengths in zip(*(leaf.shape for leaf in column), strict=True)
    ]
    shape = list(longest)
    for axis, length in enumerate(wanted or ()):
        if length is None or length == -1:
            continue
        if longest[axis] > length:
            raise ValueError(
                f"expected arrays of at most {length} along dimension {axis} in a "
                f"padded batch, found {longest[axis]}; give a larger padded_shapes"
            )
        shape[axis] = length
    first = column[0]
    dtype = np.result_type(*(leaf.dtype for leaf in column))
    fill = {"U": "", "S": b""}.get(dtype.kind, 0) if fill is None else fill
    whole: Array = array_module(first).full((len(column), *shape), fill, dtype)
    for row, leaf in zip(whole, column, strict=True):
        row[tuple(slice(length) for length in leaf.shape)] = leaf
    return whole


def spec_of(element: Tree) -> Tree:
    """Return the shape and dtype of each array of an element."""
    return tree_map(lambda leaf: ArraySpec(np.shape(leaf), leaf.dtype), element)


def merged_spec(specs: Sequence[Tree]) -> Tree:
    """Merge specs into one spec of all elements; lengths that differ become None."""
    leaves, structure = _leaves_of_all(specs)
    return unflatten(structure, [_merged(column) for column in leaves])


def _merged(column: Sequence[ArraySpec]) -> ArraySpec:
    shapes = [spec.shape for spec in column]
    dtypes = {spec.dtype for spec in column}
    dtype = column[0].dtype if len(dtypes) == 1 else np.result_type(*dtypes)
    if any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
        return ArraySpec(None, dtype)
    lengths = (set(axis) for axis in zip(*shapes, strict=True))
    shape = tuple(found.pop() if len(found) == 1 else None for found in lengths)
    return ArraySpec(shape, dtype)


def made_spec(stage: Any, spec_of_made: Callable[[Tree], Tree]) -> Tree:
    """Call a function with a few elements, and return the spec of its results.

    ``spec_of_made`` calls the function, and returns the spec of the result. Its
    argument is each of the first elements of ``stage`` and, if lengths differ, an
    element of another length; if there are none, arrays of ones and of twos.
    """
    found, first = probed(stage.iterate(0), spec_of_made)
    known = stage.spec()
    if not found:
        found = [spec_of_made(_example(known, number)) for number in (1, 2)]
    elif any(leaf.shape and None in leaf.shape for leaf in flatten(known)[0]):
        with contextlib.suppress(Exception):
            found.append(spec_of_made(_resized(first, known)))
    return merged_spec(found)


def probed(
    elements: Iterator[Tree], spec_of_made: Callable[[Tree], Tree]
) -> tuple[list[Tree], Tree]:
    """Return the specs that a function returns for a few elements, and the first one.

    Elements that raise errors are left out; an iteration will raise the errors again.
    """
    found: list[Tree] = []
    first: Tree = None
    for _ in range(_MOST_PROBED):
        try:
            element = next(elements)
            found.append(spec_of_made(element))
        except StopIteration:
            break
        except Exception:
            continue
        first = element if len(found) == 1 else first
        if len(found) == _PROBED:
            break
    return found, first


def _resized(element: Tree, spec: Tree) -> Tree:
    """Change the lengths of an element that are None in ``spec``, because they vary."""
    leaves, structure = flatten(element)
    specs = flatten(spec)[0]
    resized = []
    for leaf, known in zip(leaves, specs, strict=True):
        shape = [
            length if fixed is not None else length - 1 if length > 1 else length + 1
            for length, fixed in zip(np.shape(leaf), known.shape or (), strict=False)
        ]
        resized.append(np.resize(leaf, shape) if shape else leaf)
    return unflatten(structure, resized)


def _example(spec: Tree, number: int) -> Tree:
    def array(leaf: ArraySpec) -> Any:
        shape = [number if length is None else length for length in leaf.shape or ()]
        value = str(number) if leaf.dtype.kind in "US" else number
        return np.full(shape, value, leaf.dtype)[()]

    return tree_map(array, spec)


def batched_spec(spec: Tree, length: int | None) -> Tree:
    """Return the spec of ``length`` (None: a varying number of) stacked elements."""
    return tree_map(
        lambda leaf: ArraySpec(
            None if leaf.shape is None else (length, *leaf.shape), leaf.dtype
        ),
        spec,
    )


def require_same_structure(first: Tree, second: Tree) -> None:
    """Raise TypeError if two specs of elements differ in structure or dtype."""
    (one, structure), (two, other) = flatten(first), flatten(second)
    types = [[_type_of(leaf) for leaf in leaves] for leaves in (one, two)]
    if structure != other or types[0] != types[1]:
        raise TypeError(
            f"expected elements of one structure and dtype, found {first} and "
            f"{second}; cast them by map"
        )


def _type_of(spec: ArraySpec) -> str:
    # Strings of any length count as one type, as in TensorFlow.
    return spec.dtype.kind if spec.dtype.kind in "US" else str(spec.dtype)


def writable(element: Tree) -> Tree:
    """Return an element or batch with copies of its read-only arrays.

    Other libraries refuse read-only memory, or write to it anyway.
    """

    def copied(leaf: Any) -> Any:
        is_fixed = isinstance(leaf, np.ndarray) and not leaf.flags.writeable
        return leaf.copy() if is_fixed else leaf

    return tree_map(copied, element)
