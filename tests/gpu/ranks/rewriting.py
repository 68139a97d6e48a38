"""Changes functions of the rank tests where CuPy lacks what they are written with."""

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
    """Return code that looks for another module than ``np``."""
    names = tuple(_NAME if name == "np" else name for name in code.co_names)
    constants = tuple(
        _renamed(item) if isinstance(item, CodeType) else item
        for item in code.co_consts
    )
    return code.replace(co_names=names, co_consts=constants)


def numpy_itself(module: ModuleType, function: Any) -> Any:
    """Let a function or fixture of a module work with NumPy."""
    setattr(module, _NAME, numpy)
    plain = getattr(function, "_fixture_function", function)
    plain.__code__ = _renamed(plain.__code__)
    return function


def comparing(module: ModuleType, function: Any) -> Any:
    """Let a helper compare by NumPy, with copies in host memory.

    What it is given first must be on the GPU where any of the rest is.
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
    """Let a helper compute by NumPy in host memory, and put the result on the GPU."""
    own = numpy_itself(module, function)

    @functools.wraps(own)
    def compute(*args: Any, **kwargs: Any) -> Any:
        return on_device(own(*on_host(args), **on_host(kwargs)))

    return compute


def giving(module: ModuleType, function: Any) -> Any:
    """Let a helper return copies in host memory."""

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        return on_host(function(*args, **kwargs))

    return compute


def at_once(module: ModuleType, function: Any) -> Any:
    """Compare mirrored variables in the entry in which they were copied.

    In the whole job: it is a number of the library.
    """
    gpu_copies.LAG = 0
    return function


def settling(module: ModuleType, function: Any) -> Any:
    """Let a helper wait for the GPU at its end, as nothing else does."""

    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        cupy.cuda.Device().synchronize()
        return result

    return wait


def together(module: ModuleType, function: Any) -> Any:
    """Let a helper that is given arrays of both libraries compute on the GPU."""

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any_is(is_device, [args, kwargs]):
            return function(*on_device(args), **on_device(kwargs))
        return function(*args, **kwargs)

    return compute


def written_back(module: ModuleType, function: Any) -> Any:
    """Let a helper write into a copy of a variable in host memory, and put it back."""
    own = numpy_itself(module, function)

    @functools.wraps(own)
    def write(variable: Any, *args: Any) -> Any:
        held = SimpleNamespace(component=cupy.asnumpy(variable.component))
        result = own(held, *args)
        variable.component[...] = cupy.asarray(held.component)
        return result

    return write


def drawing(module: ModuleType, function: Any) -> Any:
    """Leave the types that CuPy does not have out of what hypothesis draws."""
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
    """Return what lets a test work by NumPy, and give a method copies on the GPU.

    The method's results must be there too.
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
