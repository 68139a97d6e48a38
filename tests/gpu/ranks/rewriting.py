"""Changes to functions of the rank tests that use features CuPy lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import cupy
import numpy
import pytest

from hpcstrat.safety.divergence import gpu_copies
from tests.gpu.ranks.arrays import any_is, has_type, is_device, on_device, on_host

__all__ = [
    "at_once",
    "at_seam",
    "comparing",
    "computing",
    "drawing",
    "giving",
    "numpy_itself",
    "settling",
    "together",
    "written_back",
]

_NAME = "_numpy_itself"


def _renamed(code: CodeType) -> CodeType:
    """Return code that uses another module instead of ``np``."""
    names = tuple(_NAME if name == "np" else name for name in code.co_names)
    constants = tuple(
        _renamed(item) if isinstance(item, CodeType) else item
        for item in code.co_consts
    )
    return code.replace(co_names=names, co_consts=constants)


def numpy_itself(module: ModuleType, function: Any) -> Any:
    """Make a function or fixture of a module use NumPy."""
    setattr(module, _NAME, numpy)
    plain = getattr(function, "_fixture_function", function)
    plain.__code__ = _renamed(plain.__code__)
    return function


def comparing(module: ModuleType, function: Any) -> Any:
    """Make a helper compare with NumPy, with copies in host memory.

    The first argument must be on the GPU if any other argument is.
    """
    own = numpy_itself(module, function)

    @functools.wraps(own)
    def compare(found: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if any_is(is_device, args):
            assert isinstance(found, cupy.ndarray), f"{found!r} is on the host"
        return own(on_host(found), *on_host(args), **kwargs)

    return compare


def computing(module: ModuleType, function: Any) -> Any:
    """Make a helper compute with NumPy on the host, and copy the result to the GPU."""
    own = numpy_itself(module, function)

    @functools.wraps(own)
    def compute(*args: Any, **kwargs: Any) -> Any:
        return on_device(own(*on_host(args), **on_host(kwargs)))

    return compute


def giving(module: ModuleType, function: Any) -> Any:
    """Make a helper return copies in host memory."""

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        return on_host(function(*args, **kwargs))

    return compute


def at_once(module: ModuleType, function: Any) -> Any:
    """Compare mirrored variables in the same entry in which they were copied.

    This changes a constant of the library for the whole job.
    """
    gpu_copies.LAG = 0
    return function


def settling(module: ModuleType, function: Any) -> Any:
    """Make a helper wait for the GPU at its end, because nothing else waits."""

    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        cupy.cuda.Device().synchronize()
        return result

    return wait


def together(module: ModuleType, function: Any) -> Any:
    """Make a helper compute on the GPU if some of its arguments are there."""

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any_is(is_device, [args, kwargs]):
            return function(*on_device(args), **on_device(kwargs))
        return function(*args, **kwargs)

    return compute


def written_back(module: ModuleType, function: Any) -> Any:
    """Make a helper write into a host copy of a variable, and copy it back."""
    own = numpy_itself(module, function)

    @functools.wraps(own)
    def write(variable: Any, *args: Any) -> Any:
        held = SimpleNamespace(component=cupy.asnumpy(variable.component))
        result = own(held, *args)
        variable.component[...] = cupy.asarray(held.component)
        return result

    return write


def drawing(module: ModuleType, function: Any) -> Any:
    """Remove types that CuPy does not have from the values that Hypothesis draws."""
    own = function.hypothesis.inner_test

    def kept(value: Any) -> Any:
        if type(value) is not list:
            return value
        return [item for item in value if not _lacks_type(item)]

    @functools.wraps(own)
    def test(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{name: kept(value) for name, value in kwargs.items()})

    function.hypothesis.inner_test = test
    return function


def _lacks_type(item: Any) -> bool:
    first = item[0] if type(item) is tuple and item else None
    return isinstance(first, numpy.dtype) and not has_type(first)


def at_seam(owner: Any, name: str) -> Callable[[ModuleType, Any], Any]:
    """Return a change that runs a test with NumPy, but passes GPU copies to a method.

    The change also asserts that the method's results are on the GPU.
    """

    def moved(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = on_device(args)
            result = method(self, *given, **kwargs)
            if any_is(is_device, given):
                assert any_is(is_device, result), f"{result!r} is on the host"
            return on_host(result)

        return call

    def change(module: ModuleType, function: Any) -> Any:
        own = numpy_itself(module, function)

        @functools.wraps(own)
        def test(*args: Any, **kwargs: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, moved(getattr(owner, name)))
                own(*args, **kwargs)

        return test

    return change
