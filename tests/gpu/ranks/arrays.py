"""A stand-in for the module ``numpy`` in the rank tests: its arrays are on a GPU.

Functions that make arrays return CuPy arrays. Functions on CuPy arrays are CuPy's; if
CuPy does not have a function, it is computed on the host, and the results are copied
back. Functions that compare arrays copy them to the host. Types, constants and scalars
are NumPy's, as in CuPy, and arrays of types that CuPy does not have stay in host
memory.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import cupy
import numpy
import pytest

from hpcstrat.engine.values import ArrayOperators

__all__ = [
    "DeviceNumpy",
    "DevicePytest",
    "has_type",
    "is_device",
    "on_device",
    "on_host",
]

_KINDS = "biufc"
_MOST_BYTES = {"f": 8, "c": 16}
# NumPy's own types have numbers below this.
_FIRST_FOREIGN_TYPE = 256

# Functions that make an array of numbers.
_NUMBERS = ("arange", "eye", "frombuffer", "full", "identity", "linspace")
# Functions that make an array from any argument.
_MAKE = ("array", "asarray", "ascontiguousarray", "asfortranarray", "empty", "ones")
_MAKE += ("tile", "zeros")
# Functions that take a list of arrays; for other functions, a list is an array.
_JOIN = ("concatenate", "hstack", "stack", "vstack")
_COMPARE = ("allclose", "array_equal")
# Functions of CuPy that do not accept arrays for all arguments.
_HOST_ONLY = ("repeat",)


def has_type(dtype: Any) -> bool:
    """Return whether CuPy has arrays of a type."""
    found = numpy.dtype(dtype)
    if found.kind not in _KINDS or found.num >= _FIRST_FOREIGN_TYPE:
        return False
    return found.isnative and found.itemsize <= _MOST_BYTES.get(found.kind, 8)


def is_device(value: Any) -> bool:
    """Return whether a value is an array on a GPU, or acts as one."""
    if not isinstance(value, ArrayOperators):
        return isinstance(value, cupy.ndarray)
    # Avoid value(), which may be a collective call.
    own = getattr(value, "_component", None)
    return isinstance(
        getattr(value, "_local", None) if own is None else own, cupy.ndarray
    )


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of nested lists, tuples and dictionaries."""
    if type(value) in (list, tuple):
        return type(value)(_map(item, change) for item in value)
    if type(value) is dict:
        return {key: _map(item, change) for key, item in value.items()}
    return change(value)


def any_is(test: Callable[[Any], bool], tree: Any) -> bool:
    """Return whether a test is true for an element of nested lists."""
    found: list[bool] = []
    _map(tree, lambda leaf: found.append(test(leaf)))
    return any(found)


def _array_of(value: Any) -> Any:
    """Return the CuPy array of a value that is an array, or acts as one."""
    if isinstance(value, cupy.ndarray):
        return value
    # Some variables compute their aggregate only when it is requested.
    return value.value() if hasattr(value, "read_value") else cupy.asarray(value)


def on_host(tree: Any) -> Any:
    """Replace the arrays on GPUs in nested lists by copies in host memory."""
    return _map(tree, lambda v: cupy.asnumpy(_array_of(v)) if is_device(v) else v)


def on_device(tree: Any) -> Any:
    """Replace NumPy's arrays in nested lists by copies on the GPU, types permitting."""

    def put(value: Any) -> Any:
        plain = type(value) is numpy.ndarray and has_type(value.dtype)
        return cupy.asarray(value) if plain else value

    return _map(tree, put)


def _gathered(value: Any) -> Any:
    """Return nested lists of numbers or arrays as one CuPy array."""
    if type(value) in (list, tuple):
        return cupy.asarray([_gathered(item) for item in value])
    return _array_of(value) if is_device(value) else cupy.asarray(value)


class _Function:
    """A function of NumPy that runs on the GPU if its arguments are there."""

    def __init__(self, name: str, function: Any, own: Any) -> None:
        self._name = name
        self._function = function
        self._own = None if name in _HOST_ONLY else own

    def __repr__(self) -> str:
        return f"<{self._name} of NumPy or CuPy>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        everything = [args, kwargs]
        if not any_is(is_device, everything):
            result = self._function(*args, **kwargs)
            # Functions of the tests' own host arrays stay on the host.
            makes = self._name in (*_MAKE, *_NUMBERS) or not any_is(
                lambda leaf: isinstance(leaf, numpy.ndarray), everything
            )
            return on_device(result) if makes else result
        if self._name in _COMPARE:
            return self._function(*on_host(args), **on_host(kwargs))
        if self._own is None or self._name in _NUMBERS or not _has_types(everything):
            return on_device(self._function(*on_host(args), **on_host(kwargs)))
        first, *rest = on_device(args)
        if type(first) in (list, tuple):
            parts = [_gathered(part) for part in first]
            first = parts if self._name in _JOIN else cupy.stack(parts)
        elif isinstance(first, ArrayOperators) and not isinstance(self, _Ufunc):
            first = _array_of(first)
        return self._own(first, *rest, **on_device(kwargs))


def _has_types(tree: Any) -> bool:
    def lacks(value: Any) -> bool:
        kind = isinstance(value, numpy.dtype | type)
        return kind and not has_type(value)

    return not any_is(lacks, tree)


class _Ufunc(_Function):
    """A universal function; CuPy has only some of its methods."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._function, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*on_host(args), **on_host(kwargs))
            return on_device(result) if any_is(is_device, [args, kwargs]) else result

        return call

    def at(self, array: Any, *args: Any) -> None:
        """Change an array in place, in the order of the indices."""
        whole = on_host(array)
        self._function.at(whole, *on_host(args))
        if whole is not array:
            array[...] = cupy.asarray(whole)


class _OnHost:
    """A module of NumPy whose functions get host copies, and return NumPy results."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return found(*on_host(args), **on_host(kwargs))

        return call


class _Generator:
    """A NumPy random generator that returns arrays on the GPU."""

    def __init__(self, *args: Any) -> None:
        self._own = numpy.random.default_rng(*on_host(args))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._own, name)
        if not callable(method):
            return method

        def draw(*args: Any, **kwargs: Any) -> Any:
            return on_device(method(*on_host(args), **on_host(kwargs)))

        return draw


class _Random:
    """The module ``numpy.random``, whose generators return arrays on the GPU."""

    default_rng = _Generator

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy.random, name)


class DeviceNumpy(types.ModuleType):
    """The module that the rank tests import as ``numpy``."""

    ndarray = cupy.ndarray
    testing = _OnHost(numpy.testing)
    # CuPy has no masked arrays.
    ma = _OnHost(numpy.ma)
    random = _Random()

    def __init__(self) -> None:
        super().__init__("numpy", __doc__)

    def __getattr__(self, name: str) -> Any:
        value = getattr(numpy, name)
        if isinstance(value, type | types.ModuleType) or not callable(value):
            return value
        kind = _Ufunc if isinstance(value, numpy.ufunc) else _Function
        made = kind(name, value, getattr(cupy, name, None))
        setattr(self, name, made)
        return made

    @staticmethod
    def shares_memory(one: Any, other: Any) -> bool:
        """Return whether two arrays overlap; host and GPU arrays never do."""
        if is_device(one) != is_device(other):
            return False
        return bool((cupy if is_device(one) else numpy).shares_memory(one, other))


class _Approximately:
    """A ``pytest.approx`` that compares on the host."""

    # These attributes make CuPy arrays leave the comparison to this class.
    __array_ufunc__ = None
    __array_priority__ = 1000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._own = pytest.approx(*on_host(args), **kwargs)

    def __eq__(self, actual: object) -> bool:
        return bool(self._own == on_host(actual))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._own)


class DevicePytest(types.ModuleType):
    """The module that the rank tests import as ``pytest``."""

    approx = _Approximately

    def __init__(self) -> None:
        super().__init__("pytest", pytest.__doc__)

    def __getattr__(self, name: str) -> Any:
        return getattr(pytest, name)
