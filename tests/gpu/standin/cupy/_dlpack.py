"""DLPack: capsules made and read through ctypes (the layouts of DLPack 0.8 and 1.0)."""

import ctypes
import sys

import numpy as np

from cupy import _core
from cupy.cuda import memory, runtime, stream

_CUDA = 2
_CPU = 1
_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_CODES = {code: kind for kind, code in _KINDS.items()}
_BFLOAT = 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_LAYOUTS = {b"dltensor": _Managed, b"dltensor_versioned": _Versioned}
_exported = {}

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


@_DELETER
def _forget(address):
    """Release an exported array; a consumer calls this function at its end."""
    _exported.pop(address, None)


def _sweep():
    """Release arrays in capsules that were not consumed and are no longer referenced.

    A destructor of the capsule cannot do this: the destructor would be a Python
    function, which cannot run while an exception is being raised.
    """
    for address, (_, _, _, name, capsule) in list(_exported.items()):
        if _is_capsule(capsule, name) and sys.getrefcount(capsule) <= _HELD:
            del _exported[address]


# The references of the table, of the list of its items, of the loop and of the call.
_HELD = 3


def _establish_order(given):
    current = stream.get_current_stream()
    if given is None:
        given = runtime.streamLegacy
    elif not isinstance(given, int) or given < -1 or given == 0:
        raise ValueError(
            "On CUDA, the valid stream for the DLPack protocol is -1, 1, 2, or any "
            f"larger value, but {given} was provided"
        )
    if given >= 0 and given != (current.ptr or runtime.streamLegacy):
        # The consumer's stream waits for the work on the producer's stream.
        event = current.record()
        runtime.streamWaitEvent(given, event.ptr)


def export(array, given, max_version, dl_device, copy):
    """Return a capsule over an array's memory."""
    if dl_device is not None and tuple(dl_device) != array.__dlpack_device__():
        # CuPy can copy to the host here (kDLCPU), but these tests do not need it.
        raise BufferError(f"unsupported device for export: {dl_device}")
    brain = array.dtype.name == "bfloat16"
    if not brain and (array.dtype.kind not in _KINDS or array.dtype.names):
        raise BufferError("dtype is not supported for dlpack export")
    if copy:
        array = array.copy()
    _establish_order(given)
    versioned = max_version is not None and max_version[0] >= 1
    name = b"dltensor_versioned" if versioned else b"dltensor"
    managed = _LAYOUTS[name]()
    numbers = (ctypes.c_int64 * (2 * array.ndim or 1))(
        *array.shape, *(step // array.itemsize for step in array.strides)
    )
    if versioned:
        managed.major, managed.minor = 1, 0
    tensor = managed.tensor
    tensor.data = array.data.ptr
    tensor.device_type, tensor.device_id = _CUDA, array.data.device_id
    tensor.ndim = array.ndim
    tensor.code = _BFLOAT if brain else _KINDS[array.dtype.kind]
    tensor.bits, tensor.lanes = array.itemsize * 8, 1
    pointer = ctypes.POINTER(ctypes.c_int64)
    tensor.shape = ctypes.cast(numbers, pointer)
    tensor.strides = ctypes.cast(ctypes.addressof(numbers) + 8 * array.ndim, pointer)
    managed.deleter = ctypes.cast(_forget, ctypes.c_void_p)
    _sweep()
    address = ctypes.addressof(managed)
    capsule = _api.PyCapsule_New(address, name, None)
    _exported[address] = managed, numbers, array, name, capsule
    return capsule


class DLPackMemory(memory.BaseMemory):
    """Memory of a DLPack capsule, which this object consumes."""

    def __init__(self, capsule):
        self._managed = None
        for name, layout in _LAYOUTS.items():
            if _is_capsule(capsule, name):
                address = _api.PyCapsule_GetPointer(capsule, name)
                self._used = b"used_" + name
                _api.PyCapsule_SetName(capsule, self._used)
                self._managed = layout.from_address(address)
                break
        else:
            raise ValueError(
                "A DLPack tensor object cannot be consumed multiple times (or object "
                f"was not a DLPack capsule). Got: {capsule!r}"
            )
        self.tensor = tensor = self._managed.tensor
        if tensor.device_type != _CUDA:
            raise RuntimeError(
                "CuPy is built against CUDA, different from the backend that backs "
                "the incoming DLPack tensor"
            )
        self.dtype = _dtype(tensor)
        self.shape = tuple(tensor.shape[: tensor.ndim])
        self.strides = None
        if tensor.strides:
            step = self.dtype.itemsize
            self.strides = tuple(n * step for n in tensor.strides[: tensor.ndim])
        self.size = _extent(self.shape, self.strides, self.dtype) + tensor.byte_offset
        block = memory.UnownedMemory(tensor.data or 0, self.size, None)
        self.ptr, self.device_id, self._raw = block.ptr, tensor.device_id, block._raw

    def __del__(self):
        if self._managed is not None and self._managed.deleter:
            _DELETER(self._managed.deleter)(ctypes.addressof(self._managed))


def _is_capsule(value, name):
    return type(value).__name__ == "PyCapsule" and _api.PyCapsule_IsValid(value, name)


def _extent(shape, strides, dtype):
    if 0 in shape:
        return 0
    if strides is None:
        return int(np.prod(shape, dtype=object)) * dtype.itemsize
    steps = zip(shape, strides, strict=True)
    return sum((n - 1) * step for n, step in steps) + dtype.itemsize


def _dtype(tensor):
    if tensor.lanes != 1:
        raise ValueError(f"vector dtypes (lanes={tensor.lanes}) is not supported")
    if tensor.code == _BFLOAT and tensor.bits == 16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if tensor.code not in _CODES:
        raise TypeError(f"Unsupported dtype. dtype code: {tensor.code}")
    return np.dtype(f"{_CODES[tensor.code]}{tensor.bits // 8}")


def load(array, device, copy):
    """Return an array over memory that another library exports."""
    if device is not None:
        raise NotImplementedError("from_dlpack() does not support device yet.")
    if not hasattr(array, "__dlpack_device__"):
        return _consume(array)
    kind, number = array.__dlpack_device__()
    if kind == _CPU:
        raise TypeError(
            "CPU arrays cannot be directly imported to CuPy. Use "
            "`cupy.array(numpy.from_dlpack(input))` instead."
        )
    if kind != _CUDA:
        raise TypeError(f"Unsupported array type: {kind}")
    with runtime._device(number):
        current = stream.get_current_stream().ptr or runtime.streamLegacy
        try:
            capsule = array.__dlpack__(stream=current, max_version=(1, 0), copy=copy)
        except TypeError:
            if copy is not None:
                raise
            capsule = array.__dlpack__(stream=current)
    return _consume(capsule)


def _consume(capsule):
    mem = DLPackMemory(capsule)
    pointer = memory.MemoryPointer(mem, int(mem.tensor.byte_offset))
    return _core.ndarray(mem.shape, mem.dtype, pointer, mem.strides)
