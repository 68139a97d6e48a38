"""Functions that make arrays: new ones, from the host, and from other libraries."""

import numpy as np

from cupy import _core, _dlpack, _standin, _submit
from cupy.cuda import memory, stream


def new(shape, dtype=float, order="C"):
    """Return an array whose memory is not written yet."""
    return _core.ndarray(shape, dtype, order=order)


def copy_elements(target, source):
    """Submit a copy between arrays, with a cast to the target's type."""
    _submit.check_device(source)
    _submit.check_device(target)
    _standin.count_copy("device_to_device", target.nbytes)
    to, back = target._host, source._host
    _submit.submit(lambda: np.copyto(to, back, casting="unsafe"))


def empty(shape, dtype=float, order="C"):
    return new(shape, dtype, order)


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype, order)


def ones(shape, dtype=float):
    return full(shape, 1, dtype)


def full(shape, fill_value, dtype=None, order="C"):
    if dtype is None:
        dtype = getattr(fill_value, "dtype", None) or np.asarray(fill_value).dtype
    made = new(shape, dtype, order)
    if _submit.is_array(fill_value):
        made[...] = fill_value
    else:
        made.fill(fill_value)
    return made


def _like(a, dtype, order, shape):
    if not _submit.is_array(a):
        raise TypeError(f"expected a cupy.ndarray, got {type(a)}")
    if order not in {"C", "F", "A", "K", None}:
        raise TypeError(f"order not understood: {order}")
    if order in {"K", "A", None}:
        order = "F" if a.flags.fnc else "C"
    return {
        "shape": a.shape if shape is None else shape,
        "dtype": a.dtype if dtype is None else dtype,
        "order": order,
    }


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    return empty(**_like(prototype, dtype, order, shape))


def zeros_like(a, dtype=None, order="K", subok=None, shape=None):
    return zeros(**_like(a, dtype, order, shape))


def ones_like(a, dtype=None, order="K", subok=None, shape=None):
    return full(fill_value=1, **_like(a, dtype, order, shape))


def full_like(a, fill_value, dtype=None, order="K", subok=None, shape=None):
    return full(fill_value=fill_value, **_like(a, dtype, order, shape))


def array(
    obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False
):
    """Return an array on the current device."""
    if subok:
        raise NotImplementedError("subok is not supported")
    obj = _imported(obj)
    if isinstance(obj, _core.ndarray):
        made = _from_device(obj, dtype, copy, order)
    elif _holds_arrays(obj):
        made = _stacked(obj, dtype)
    else:
        made = _from_host(obj, dtype, order)
    if made.ndim < ndmin:
        made = made.reshape((1,) * (ndmin - made.ndim) + made.shape)
    if blocking:
        stream._synchronize()
    return made


def _from_device(obj, dtype, copy, order):
    dtype = obj.dtype if dtype is None else np.dtype(dtype)
    if obj.data.device_id != memory.runtime.getDevice():
        copy = True
    return obj.astype(dtype, order=order or "K", copy=bool(copy))


def _from_host(obj, dtype, order):
    host = np.array(obj, dtype=dtype, order=order or "K")
    made = new(host.shape, _core.known(host.dtype), "F" if host.flags.fnc else "C")
    target = made._host
    if made.size:
        # CuPy stages the data in page-locked memory before it returns.
        _standin.count_copy("host_to_device", made.nbytes)
        stream._current_queue().put(lambda: np.copyto(target, host))
    return made


def _holds_arrays(obj):
    while isinstance(obj, list | tuple) and obj:
        obj = obj[0]
    return isinstance(obj, _core.ndarray)


def _stacked(obj, dtype):
    parts = [part if isinstance(part, _core.ndarray) else array(part) for part in obj]
    made = _submit.run(np.stack, (parts,), {}, new)
    return made if dtype is None else made.astype(dtype, copy=False)


def _imported(obj):
    if isinstance(obj, _core.ndarray | np.ndarray | np.generic):
        return obj
    if hasattr(obj, "__cuda_array_interface__"):
        return _from_interface(obj)
    return obj


def _from_interface(obj):
    described = obj.__cuda_array_interface__
    shape, dtype = described["shape"], np.dtype(described["typestr"])
    if described.get("mask") is not None:
        raise ValueError("CuPy currently does not support masked arrays.")
    strides = described.get("strides")
    ptr = described["data"][0]
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    if strides is not None and nbytes:
        steps = zip(shape, strides, strict=True)
        nbytes = sum((n - 1) * step for n, step in steps) + dtype.itemsize
    mem = memory.UnownedMemory(ptr, nbytes, obj, 0 if not ptr else -1)
    given = described.get("stream")
    if given is not None:
        if given == 0:
            raise ValueError("stream=0 is not allowed in __cuda_array_interface__")
        # CuPy waits here, too, unless CUPY_CUDA_ARRAY_INTERFACE_SYNC is 0.
        memory.runtime.streamSynchronize(given)
    return _core.ndarray(shape, dtype, memory.MemoryPointer(mem, 0), strides)


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    if copy is False and not isinstance(a, _core.ndarray):
        raise ValueError("Unable to avoid copy while creating an array as requested.")
    return array(a, dtype, bool(copy), order, blocking=blocking)


def asanyarray(a, dtype=None, order=None, *, blocking=False):
    return array(a, dtype, False, order, blocking=blocking)


def ascontiguousarray(a, dtype=None):
    made = asarray(a, dtype, "C")
    return made if made.ndim else made.reshape(1)


def asfortranarray(a, dtype=None):
    return asarray(a, dtype, "F")


def copy(a, order="K"):
    if not _submit.is_array(a):
        a = array(a)
    return a.copy(order=order)


def arange(start, stop=None, step=1, dtype=None):
    if stop is None:
        start, stop = 0, start
    return _written(np.arange(start, stop, step, dtype))


def linspace(start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0):
    made = np.linspace(start, stop, num, endpoint, retstep, dtype, axis)
    return (_written(made[0]), made[1]) if retstep else _written(made)


def eye(N, M=None, k=0, dtype=float, order="C"):
    return _written(np.eye(N, M, k, dtype, order))


def identity(n, dtype=float):
    return _written(np.identity(n, dtype))


def _written(host):
    """Return an array that the device fills, without counting a copy from the host."""
    made = new(host.shape, host.dtype, "F" if host.flags.fnc else "C")
    target = made._host
    _submit.submit(lambda: np.copyto(target, host))
    return made


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """Return a copy on the host."""
    if not isinstance(a, _core.ndarray):
        if hasattr(a, "__cuda_array_interface__"):
            a = asarray(a)
        elif out is not None:
            np.copyto(out, a)
            return out
        else:
            return np.asarray(a, order=order)
    return a.get(stream=stream, order=order, out=out, blocking=blocking)


def copyto(dst, src, casting="same_kind", where=None):
    """Copy elements, with broadcasting."""
    if isinstance(src, np.ndarray) and src.ndim:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    if not isinstance(dst, _core.ndarray):
        raise TypeError(f"copyto: expected a cupy.ndarray, got {type(dst)}")
    value = _submit.host(src)
    kind = value.dtype if isinstance(value, np.ndarray | np.generic) else None
    if kind is not None and not np.can_cast(kind, dst.dtype, casting):
        raise TypeError(f"Cannot cast {kind} to {dst.dtype} in {casting} casting mode")
    np.broadcast_to(_submit.shadow(np.asarray(value)), dst.shape)
    target = _submit.host(dst)
    _standin.count_copy("device_to_device", dst.nbytes)
    mask = True if where is None else _submit.host(where)
    _submit.submit(lambda: np.copyto(target, value, casting="unsafe", where=mask))


def from_dlpack(array, *, device=None, copy=None):
    """Return an array over another library's device memory."""
    return _dlpack.load(array, device, copy)


_core.new = new
_core.zeros = zeros
_core.array = array
_core.asarray = asarray
_core.copy_elements = copy_elements
