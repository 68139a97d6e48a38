"""Array operations that are planned without their data, and run later by NumPy."""

import warnings

import numpy as np

from cupy import _standin
from cupy._util import PerformanceWarning
from cupy.cuda import runtime, stream


def unsupported(value):
    """Return the error for a value that CuPy does not accept as an operand."""
    return TypeError(f"Unsupported type {type(value)}")


def check_device(array):
    """Raise or warn for an array of another device, like CuPy."""
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
    """Return whether a value is a CuPy array."""
    return hasattr(value, "_host")


def each(value, change):
    """Return ``value`` with ``change`` applied to the leaves of its containers."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(each(item, change) for item in value)
    if isinstance(value, dict):
        return {key: each(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(each(x, change) for x in (value.start, value.stop, value.step)))
    return change(value)


def host(value):
    """Return the NumPy operand for an argument; arrays must be CuPy's."""
    if is_array(value):
        check_device(value)
        return value._host
    if isinstance(value, np.ndarray) and value.ndim:
        raise unsupported(value)
    return value


def shadow(value):
    """Return an argument of the same shape and type, filled with zeros or ones."""
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
    """Return the result of ``function`` for arguments filled with zeros or ones."""
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
    """The memory of results, without references to the arrays that own it."""

    def __init__(self, arrays):
        self.hosts = each(arrays, lambda x: x._host if is_array(x) else x)

    def store(self, values):
        """Copy the results of a function into the memory."""
        self._store(self.hosts, values)

    def _store(self, targets, values):
        if isinstance(targets, np.ndarray):
            np.copyto(targets, values, casting="unsafe")
        elif isinstance(targets, list | tuple):
            for target, value in zip(targets, values, strict=True):
                self._store(target, value)


def run(function, args, kwargs, new):
    """Submit a NumPy function; return its results, which are written later."""
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
    """Synchronize, then run a function whose results' shapes depend on the data."""
    args, kwargs = each(args, host), each(kwargs, host)
    stream._synchronize()
    with np.errstate(all="ignore"):
        values = function(*args, **kwargs)
    made = results(values, new)
    targets = Targets(made)
    submit(lambda: targets.store(values))
    return made
