"""Distributed values, which have a component for each replica.

Every process has the components of its own replicas: one component, unless a rank has
several logical replicas.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.context import current, own_index
from hpcstrat.engine.html import table
from hpcstrat.engine.tree import tree_map
from hpcstrat.engine.typing import Array, Tree

__all__ = [
    "ONE_OF_MANY",
    "ArrayOperators",
    "DistributedValues",
    "HostValue",
    "Mirrored",
    "PerReplica",
    "localize",
    "part_of",
]

_ADVICE = (
    "combine the replicas with strategy.reduce or strategy.gather, compute inside "
    "strategy.run, or read this replica's part with strategy.local_value, which is the "
    "whole value if all_reduce has made it equal on all replicas"
)
# Functions of NumPy that write into their first argument.
_WRITING = frozenset(
    (np.copyto, np.fill_diagonal, np.place, np.put, np.put_along_axis, np.putmask)
)

ONE_OF_MANY = (
    "combine its parts with strategy.reduce, or read it with strategy.local_value if "
    "it is already equal on all replicas, as after all_reduce"
)
"""Advice in errors about a PerReplica that was passed instead of one value."""


class ArrayOperators(np.lib.mixins.NDArrayOperatorsMixin):
    """NumPy's operators and functions for an object that acts as an array.

    Subclasses implement ``_operand()``, which returns the array.
    """

    __slots__ = ()
    # Hash by identity, so that objects can be keys, although ``==`` is element-wise.
    __hash__ = object.__hash__

    def _operand(self) -> Array:
        raise NotImplementedError

    def _lasting(self) -> Array | None:
        """Return the array if it exists as long as this object; None if not."""
        return self._operand()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Convert to a NumPy array; raise TypeError for an array on a GPU."""
        array = self._operand()
        if is_device(array):
            raise TypeError(
                f"expected a value in host memory to make a NumPy array, found a "
                f"{type(self).__name__} on a GPU; copy it with cupy.asnumpy, or "
                "variable.numpy()"
            )
        if dtype is not None and array.dtype != dtype:
            # NumPy 2 requires this error: the caller may want to write into the array.
            if copy is False:
                raise ValueError(
                    f"expected an array of {np.dtype(dtype)} without a copy, found "
                    f"{array.dtype}; allow the copy"
                )
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        """Apply a ufunc of NumPy to the array of this object."""
        for out in kwargs.get("out", ()):
            if isinstance(out, ArrayOperators):
                raise _not_written(ufunc, out)
        # Replace these objects by their arrays; if not, NumPy would call this method
        # again in an endless recursion.
        arrays = [x._operand() if isinstance(x, ArrayOperators) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __array_function__(
        self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Apply a function of NumPy to the array of this object."""
        written = [kwargs.get("out")]
        if func in _WRITING:
            written += [*args[:1], *map(kwargs.get, ("dst", "a", "arr"))]
        for out in written:
            if isinstance(out, ArrayOperators):
                raise _not_written(func, out)
        named = {key: _operands(value) for key, value in kwargs.items()}
        return func(*[_operands(value) for value in args], **named)

    @property
    def __cuda_array_interface__(self) -> Any:
        """The CUDA array interface of the array; AttributeError for a host array."""
        array: Any = self._lasting()
        if not is_device(array):
            raise AttributeError("an array in host memory has no CUDA array interface")
        return array.__cuda_array_interface__

    def __matmul__(self, other: Any) -> Any:
        return np.matmul(self, other)

    def __getitem__(self, key: Any) -> Any:
        """Return an element of the array, or a copy of the part that ``key`` names."""
        part = self._operand()[key]
        is_array = isinstance(part, np.ndarray) or is_device(part)
        # Copy: a view would be writable, and would change with the next update.
        return part.copy() if is_array else part

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the first dimension of the array."""
        # Copy, because rows of a view would change while a loop updates the variable.
        return iter(self._operand().copy())

    def __contains__(self, value: Any) -> bool:
        return bool(value in self._operand())

    def __len__(self) -> int:
        return len(self._operand())

    def __bool__(self) -> bool:
        return bool(self._operand())

    def __float__(self) -> float:
        return float(self._operand())

    def __int__(self) -> int:
        return int(self._operand())

    def __index__(self) -> int:
        return operator.index(self._operand())

    def __format__(self, specification: str) -> str:
        """Format the array by ``specification``."""
        return format(self._operand(), specification)


def _not_written(function: Any, out: Any) -> TypeError:
    return TypeError(
        f"expected an array for the result of {function.__name__}, found a "
        f"{type(out).__name__}, which is not updated in place; use assign, assign_add "
        "or assign_sub"
    )


def _operands(argument: Any) -> Any:
    """Replace ArrayOperators objects by their arrays, also inside lists and tuples."""
    if isinstance(argument, ArrayOperators):
        return argument._operand()
    # Return named tuples unchanged: their constructors do not accept a sequence.
    if type(argument) in (list, tuple):
        return type(argument)(map(_operands, argument))
    return argument


@dataclass(frozen=True, slots=True, eq=False)
class HostValue:
    """An initial value that stays in host memory, whatever the setting ``device`` says.

    A HostValue is meant for counters, which the host reads in each step. If ``is_own``,
    each replica keeps its own value where this value is, even on a GPU, and nothing is
    sent. If not, all replicas use replica 0's value.
    """

    array: Array
    is_own: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class Adopted:
    """An initial value whose memory becomes the variable's component, without a copy.

    If ``is_equal``, the value must be equal on all replicas, and nothing is sent.
    """

    array: Array
    is_equal: bool = field(default=False, kw_only=True)


class DistributedValues:
    """A value of one component per replica; each process has its replicas' components.

    Parameters
    ----------
    *parts : object
        The components of this process's replicas, in replica order: one component,
        unless there are logical replicas.
    """

    __slots__ = ("_parts",)

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    @property
    def _local(self) -> Any:
        """The component of the running replica; ValueError if no replica runs alone."""
        parts = self._parts
        if len(parts) == 1:
            return parts[0]
        index = own_index()
        if index is None:
            raise ValueError(
                f"expected one value, found a {type(self).__name__} of {len(parts)} "
                "replicas of this rank; compute inside strategy.run, or take them all "
                "with strategy.experimental_local_results"
            )
        return parts[index]

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this process's replicas, in replica order."""
        return self._parts


class PerReplica(ArrayOperators, DistributedValues):
    """A value whose components may differ between replicas.

    In cross-replica context it has no operators and cannot be converted to an array. In
    replica context it acts as the replica's own component.
    """

    __slots__ = ()

    def _operand(self) -> Array:
        active = current()
        if active is None or active.replica_context is None:
            raise ValueError(
                "expected one value, found a PerReplica, which has a value for each "
                f"replica; {_ADVICE}"
            )
        return _plain(self._local)

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        """Apply a ufunc in replica context; TypeError in cross-replica context."""
        active = current()
        if active is None or active.replica_context is None:
            raise TypeError(
                f"expected arrays for {ufunc.__name__}, found a PerReplica, which has "
                f"a value for each replica; {_ADVICE}"
            )
        return super().__array_ufunc__(ufunc, method, *inputs, **kwargs)

    def __format__(self, specification: str) -> str:
        """Show this replica's component; format it only in replica context."""
        # Without a format, use ``repr``, so that logging works in any context.
        return super().__format__(specification) if specification else repr(self)

    def __repr__(self) -> str:
        parts = self._parts
        if len(parts) == 1:
            return f"PerReplica(own part: {parts[0]!r})"
        return f"PerReplica(own parts: {', '.join(map(repr, parts))})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        parts = enumerate(map(repr, self._parts))
        return table("PerReplica", {f"own part {n}": part for n, part in parts})


class Mirrored(ArrayOperators, DistributedValues):
    """A value that is equal on all replicas, and acts as its local copy."""

    __slots__ = ()

    @property
    def _local(self) -> Any:
        """The copy of this process, which all of its replicas use."""
        return self._parts[0]

    def _operand(self) -> Array:
        return _plain(self._local)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the local copy."""
        # Refuse special names early: NumPy looks for many special methods.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(object.__getattribute__(self, "_local"), name)

    def __repr__(self) -> str:
        return f"Mirrored({self._local!r})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        return table("Mirrored", {"on all replicas": repr(self._local)})


def _plain(value: Any) -> Array:
    array: Array = value if is_device(value) else np.asarray(value)
    return array


def _own(leaf: Any) -> Any:
    # Variables are distributed values, too, but are passed to functions unchanged.
    return leaf._local if type(leaf) in (PerReplica, Mirrored) else leaf


def part_of(tree: Tree, index: int, *, variables: bool = False) -> Tree:
    """Replace each distributed value of a tree by the component of a local replica.

    ``index`` is the index of the replica among this process's replicas. Variables are
    returned unchanged, unless ``variables`` is true.
    """

    def part(leaf: Any) -> Any:
        kinds = type(leaf) in (PerReplica, Mirrored)
        if not kinds and not (variables and isinstance(leaf, DistributedValues)):
            return leaf
        parts = leaf.values
        return parts[index] if len(parts) > 1 else parts[0]

    return tree_map(part, tree)


def localize(tree: Tree) -> Tree:
    """Replace each distributed value by this replica's component; keep variables."""
    return tree_map(_own, tree)
