"""The array class, without its arithmetic."""

import numpy as np

from cupy import _queues, _standin, _submit
from cupy.cuda import device as _device
from cupy.cuda import memory, runtime, stream

_IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to "
    "construct a NumPy array explicitly."
)


def known(dtype):
    """Return a type that CuPy can store; functions refuse types that they lack."""
    if dtype.name == "bfloat16":
        # CuPy 14 knows this type of ml_dtypes, too.
        return dtype
    if dtype.char not in "?bhilqBHILQefdFDV" or dtype.num >= 256:
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


class Flags:
    """The layout flags of an array; like CuPy, without ``writeable``."""

    def __init__(self, c_contiguous, f_contiguous, owndata):
        self.c_contiguous = c_contiguous
        self.f_contiguous = f_contiguous
        self.owndata = owndata

    @property
    def fnc(self):
        return self.f_contiguous and not self.c_contiguous

    @property
    def forc(self):
        return self.f_contiguous or self.c_contiguous

    def __getitem__(self, name):
        names = {"C_CONTIGUOUS": "c_contiguous", "F_CONTIGUOUS": "f_contiguous"}
        names |= {"OWNDATA": "owndata", "C": "c_contiguous", "F": "f_contiguous"}
        if name not in names:
            raise KeyError(f"{name} is not defined for cupy.ndarray.flags")
        return getattr(self, names[name])

    def __repr__(self):
        return (
            f"  C_CONTIGUOUS : {self.c_contiguous}\n"
            f"  F_CONTIGUOUS : {self.f_contiguous}\n"
            f"  OWNDATA : {self.owndata}"
        )


class Base:
    """Shape, type and memory of an array."""

    __slots__ = ("__weakref__", "_base", "_data", "_host")
    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        dtype = np.dtype(dtype)
        if dtype.kind not in "biufcV":
            raise ValueError(f"Unsupported dtype {dtype}")
        if memptr is None:
            if strides is not None:
                raise ValueError("memptr is required if strides is given.")
            memptr = memory.alloc(int(np.prod(shape, dtype=object)) * dtype.itemsize)
        raw = memptr.mem._raw
        if raw is None:
            raw = np.empty(0, np.uint8)
        self._base = None
        self._data = memptr
        self._host = np.ndarray(
            shape,
            dtype,
            buffer=raw if raw.size else np.empty(1, np.uint8)[:0],
            offset=memptr._offset if raw.size else 0,
            strides=strides,
            order=order or "C",
        )

    @property
    def base(self):
        return self._base

    @property
    def data(self):
        return self._data

    @property
    def dtype(self):
        return self._host.dtype

    @property
    def shape(self):
        return self._host.shape

    @shape.setter
    def shape(self, shape):
        new_host = self._host.view()
        new_host.shape = shape
        self._host = new_host

    @property
    def strides(self):
        return self._host.strides

    @property
    def size(self):
        return self._host.size

    @property
    def nbytes(self):
        return self._host.nbytes

    @property
    def itemsize(self):
        return self._host.itemsize

    @property
    def ndim(self):
        return self._host.ndim

    @property
    def flags(self):
        flags = self._host.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)

    @property
    def device(self):
        return _device.Device(self.data.device_id)

    @property
    def __cuda_array_interface__(self):
        ptr = stream.get_current_stream().ptr
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            # 0 is ambiguous in the protocol, 1 is the legacy default stream.
            "stream": ptr or 1,
            "version": 3,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": None if self.flags.c_contiguous else self.strides,
        }

    def __array__(self, dtype=None, copy=None):
        raise TypeError(_IMPLICIT)

    def __len__(self):
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def get(self, stream=None, order="C", out=None, blocking=True):
        """Return a copy in host memory."""
        queue = _queue(stream)
        source = self._host
        if out is None:
            if order == "A":
                order = "F" if self.flags.fnc else "C"
            out = np.empty(self.shape, self.dtype, order)
        self._check_target(out)
        if not self.size:
            return out
        _standin.count_copy("device_to_host", self.nbytes)
        pinned = _page_locked(out)
        if not pinned:
            _standin.count("pageable")
        target = out
        ticket = queue.put(lambda: np.copyto(target, source))
        if blocking:
            _standin.count("stream_synchronizations")
            queue.drain()
        elif not pinned:
            queue.wait_ticket(ticket)
        return out

    def _check_target(self, out):
        if not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        if out.dtype != self.dtype:
            raise TypeError(
                f"{out.dtype} array cannot be obtained from {self.dtype} array"
            )
        if out.shape != self.shape:
            raise ValueError(
                f"Shape mismatch. Expected shape: {self.shape}, "
                f"actual shape: {out.shape}"
            )
        if not (out.flags.c_contiguous or out.flags.f_contiguous):
            raise RuntimeError(
                "`out` cannot be specified when copying to non-contiguous ndarray"
            )

    def set(self, arr, stream=None):
        """Copy an array from the host into this array."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(
                f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}"
            )
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        if not self.size:
            return
        queue = _queue(stream)
        pinned = _page_locked(arr) and (
            arr.flags.c_contiguous
            if self.flags.c_contiguous
            else arr.flags.f_contiguous
        )
        if not pinned:
            _standin.count("pageable")
            arr = arr.copy()
        _standin.count_copy("host_to_device", self.nbytes)
        target = self._host
        queue.put(lambda: np.copyto(target, arr))

    def item(self):
        """Return the only element as a Python scalar, after a wait."""
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self):
        """Return the elements as Python lists, after a wait."""
        return self.get().tolist()

    def tobytes(self, order="C"):
        """Return the elements' bytes, after a wait."""
        return self.get().tobytes(order)

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __complex__(self):
        return complex(self.get())

    def __index__(self):
        return self.get().__index__()

    def __repr__(self):
        return repr(self.get())

    def __str__(self):
        return str(self.get())

    def __format__(self, spec):
        return format(self.get(), spec)

    def __reduce__(self):
        return _restored, (self.get(),)

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    def fill(self, value):
        """Set all elements to one value."""
        if isinstance(value, np.ndarray):
            if value.ndim:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value.item()
        target, value = self._host, _submit.host(value)
        _submit.check_device(self)
        _submit.submit(lambda: target.fill(value))


def _restored(host):
    import cupy

    return cupy.array(host)


def _queue(given):
    return _queues.find_queue(_stream(given).ptr)


def _stream(given):
    return stream.get_current_stream() if given is None else given


def _page_locked(host):
    kind = runtime.pointerGetAttributes(host.ctypes.data).type
    return kind == runtime.memoryTypeHost
