"""Array operations that are planned without their data, and run later by NumPy."""

import warnings

import numpy as np

from cupy import _standin
from cupy._util import PerformanceWarning
from cupy.cuda import runtime, stream


def unsupported(value):
    """Return the error for a value that CuPy does not take as an operand."""
    return TypeError(f"Unsupported type {type(value)}")


def check_device(array):
    """Refuse or warn of an array of another device, as CuPy does."""
    device = runtime.getDevice()
    if array.data.device_id == device or not array.size:
        return
    text = (
        f"The device where the array resides ({array.data.device_id}) is "
        f"different from the current device ({device})."
    )
    if not runtime.deviceCanAccessPeer(device, array.data.device_id):
        raise ValueError(f"{text} Peer access is unavailable between these devices.")
    warnings.warn(
        f"{text} Peer access has been activated automatically.",
        PerformanceWarning,
        stacklevel=4,
    )


def is_array(value):
    """Tell whether a value is one of CuPy's arrays."""
    return hasattr(value, "_host")


def each(value, change):
    """Return ``value`` with ``change`` applied to what its containers hold."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(each(item, change) for item in value)
    if isinstance(value, dict):
        return {key: each(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(each(x, change) for x in (value.start, value.stop, value.step)))
    return change(value)


def host(value):
    """Return what NumPy works on for an argument; arrays must be CuPy's."""
    if is_array(value):
        check_device(value)
        return value._host
    if isinstance(value, np.ndarray) and value.ndim:
        raise unsupported(value)
    return value


def shadow(value):
    """Return an argument of the same shape and type, with harmless contents."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "iub":
        return np.zeros(value.shape, value.dtype)
    return np.ones(value.shape, value.dtype)


def submit(work):
    """Run ``work`` in the order of the current stream."""
    _standin.count("operations")
    return stream._current_queue().put(lambda: _quiet(work))


def _quiet(work):
    with np.errstate(all="ignore"):
        work()


def plan(function, args, kwargs):
    """Return what ``function`` gives for arguments with harmless contents."""
    with np.errstate(all="ignore"):
        return function(*each(args, shadow), **each(kwargs, shadow))


def results(planned, new):
    """Return empty CuPy arrays for planned results, in the same structure."""

    def one(value):
        if isinstance(value, np.ndarray | np.generic | bool | int | float | complex):
            value = np.asarray(value)
            return new(value.shape, value.dtype)
        return value

    return each(planned, one)


class Targets:
    """The memory of results, without the arrays that own it."""

    def __init__(self, arrays):
        self.hosts = each(arrays, lambda x: x._host if is_array(x) else x)

    def store(self, values):
        """Copy what a function returned."""
        self._store(self.hosts, values)

    def _store(self, targets, values):
        if isinstance(targets, np.ndarray):
            np.copyto(targets, values, casting="unsafe")
        elif isinstance(targets, list | tuple):
            for target, value in zip(targets, values, strict=True):
                self._store(target, value)


def run(function, args, kwargs, new):
    """Submit a function of NumPy; return its results, which are written later."""
    args, kwargs = each(args, host), each(kwargs, host)
    out = kwargs.get("out")
    made = results(plan(function, args, kwargs), new) if out is None else None
    targets = Targets(made)

    def work():
        values = function(*args, **kwargs)
        if out is None:
            targets.store(values)

    if out is not None:
        plan(function, args, kwargs)
    submit(work)
    return made


def run_now(function, args, kwargs, new):
    """Synchronize, run a function whose results' shapes depend on the data."""
    args, kwargs = each(args, host), each(kwargs, host)
    stream._synchronize()
    with np.errstate(all="ignore"):
        values = function(*args, **kwargs)
    made = results(values, new)
    targets = Targets(made)
    submit(lambda: targets.store(values))
    return made
