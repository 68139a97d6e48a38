"""Handlers for XLA's foreign function interface, in Python, so no compiler is needed.

XLA passes the addresses of arguments and results, and hpcstrat reduces the arguments
into the memory of the results. The structures are copied from
``xla/ffi/api/c_api.h``, which is part of jaxlib. Newer versions may add fields after
the fields that are listed here, see `_misfit`.

**On a GPU** XLA calls the handler while it submits a program to the device
(`CustomCallThunk::ExecuteOnStream`). At that time, earlier work of XLA's stream may
still have to compute the arguments, and the results may be written by work that is
added to the stream from now on. During the call, XLA's stream is the current stream of
CuPy. So hpcstrat's lane waits for XLA's stream before the exchange, and XLA's stream
waits for the lane afterwards, by events. XLA owns all memory, and reuses it in the
order of the same stream. So the handler may delete its arrays over this memory when it
returns, even if the device has not read the memory yet.

XLA records only those handlers into a CUDA graph that declare support for it; these
handlers do not. If a handler on a GPU completed after its return, XLA would block the
calling thread (`Invoke` in ``xla/ffi/invoke.cc``). So only handlers on CPUs complete
after their return.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hpcstrat.engine.gpu.device_memory import memory_at
from hpcstrat.engine.typing import Array

__all__ = ["DTYPES", "GPU_TARGET", "TARGET", "key_of", "register"]

TARGET = "hpcstrat_exchange"
GPU_TARGET = "hpcstrat_exchange_on_gpu"
_MAJOR = 0
_METADATA, _EXECUTE, _INTERNAL = 1, 3, 13
_TOKEN = 17
# Names of types by their numbers in XLA_FFI_DataType: `_FIRST` are numbers 1 to 12.
_FIRST = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
)
_NAMES = dict(enumerate(_FIRST.split(), 1))
_NAMES |= {15: "complex64", 16: "bfloat16", 18: "complex128"}
# Importing JAX adds ml_dtypes' types, such as bfloat16, to NumPy's dtypes.
DTYPES = {number: jax.numpy.dtype(name) for number, name in _NAMES.items()}


def _structure(**fields: Any) -> Any:
    """Return a ctypes structure with the given fields."""
    return type("Structure", (ctypes.Structure,), {"_fields_": [*fields.items()]})


def _headed(**fields: Any) -> Any:
    """Return a structure that begins with the two header fields of XLA's structures."""
    return _structure(size=c_size_t, extension=c_void_p, **fields)


_Extension = _structure(size=c_size_t, type=c_int, next=c_void_p)
_Version = _headed(major=c_int, minor=c_int)
_Buffer = _headed(dtype=c_int, data=c_void_p, rank=c_int64, dims=POINTER(c_int64))
_Buffers = _headed(length=c_int64, types=c_void_p, items=POINTER(POINTER(_Buffer)))
_Scalar = _structure(dtype=c_int, value=POINTER(c_int64))
_Attributes = _headed(
    length=c_int64, types=c_void_p, names=c_void_p, items=POINTER(POINTER(_Scalar))
)
_ErrorArguments = _headed(message=c_char_p, code=c_int)
_StreamArguments = _headed(context=c_void_p, stream=c_void_p)
_Api = _headed(
    version=_Version,
    internal=c_void_p,
    error_create=ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments)),
    others=c_void_p * 3,
    stream_get=ctypes.CFUNCTYPE(c_void_p, POINTER(_StreamArguments)),
)
_FutureArguments = _headed(future=c_void_p, error=c_void_p)
_OfFutures = ctypes.CFUNCTYPE(c_void_p, POINTER(_FutureArguments))
# The interface of newer versions, whose handlers may complete after they have returned.
_LongApi = _structure(
    known=_Api,
    more=c_void_p * 8,
    future_create=_OfFutures,
    future_set_available=_OfFutures,
    future_set_error=_OfFutures,
)
_Frame = _headed(
    api=POINTER(_Api),
    context=c_void_p,
    stage=c_int,
    arguments=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
)
_LongFrame = _structure(known=_Frame, future=c_void_p)
_Metadata = _structure(size=c_size_t, version=_Version, traits=c_uint32)
_MetadataExtension = _structure(base=_Extension, metadata=POINTER(_Metadata))


# A function that a compiled program calls by a number, its key. The first argument is a
# function that returns the arrays of this call: the inputs, and the arrays for the
# results. The second is a function that makes XLA wait until the exchange is complete.
# The third is XLA's stream, if the program runs on a GPU.
_Exchange = Callable[
    [
        Callable[[], tuple[list[Array], list[Array]]],
        Callable[[], Callable[[BaseException | None], None]],
        int | None,
    ],
    None,
]
_keys: dict[Any, int] = {}
_exchanges: dict[int, _Exchange] = {}
_numbers = itertools.count()


def key_of(name: Any, exchange: _Exchange) -> int:
    """Return the number by which XLA's programs call the exchange of this name."""
    if name not in _keys:
        number = next(_numbers)
        _exchanges[number] = exchange
        _keys[name] = number
    return _keys[name]


@functools.cache
def _found_version() -> tuple[int, ...]:
    """Return major and minor version of XLA's interface; empty if there is none.

    The version is read from the header file, because XLA asks for the handler's version
    before XLA reports its own version.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = header.read_text() if header.exists() else ""
    found = [
        re.search(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.M)
        for part in ("MAJOR", "MINOR")
    ]
    return tuple(int(number[1]) for number in found if number)


def _version_problem() -> str:
    found = _found_version()
    if found[:1] == (_MAJOR,):
        return ""
    return (
        f"expected XLA's foreign function interface of version {_MAJOR}, found "
        f"{found[0] if found else 'none'} in jax {jax.__version__}"
    )


def _misfit(frame: Any) -> str:
    """Return an error text, empty if XLA's version and structures are as expected."""
    sizes = [
        *[(frame, _Frame), (frame.api.contents, _Api), (frame.arguments, _Buffers)],
        *[(frame.results, _Buffers), (frame.attributes, _Attributes)],
    ]
    if not _version_problem() and all(
        found.size >= ctypes.sizeof(known) for found, known in sizes
    ):
        return ""
    return (
        f"expected XLA's foreign function interface of version {_MAJOR}, found "
        f"{_found_version()} with structures of {[found.size for found, _ in sizes]} "
        "bytes"
    )


class _Memory:
    """Gives NumPy access to memory of XLA, which exists while the handler runs."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }


def _array(address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the memory at an address as an array of this shape and dtype."""
    if 0 in shape:
        return np.empty(shape, dtype)
    if dtype.isbuiltin == 1:
        return np.asarray(_Memory(address, shape, dtype.str))
    # NumPy's array interface has no names for dtypes of ml_dtypes, so view integers.
    plain = np.asarray(_Memory(address, shape, f"<u{dtype.itemsize}"))
    return plain.view(dtype)


def _arrays(
    buffers: Any, array: Callable[[int, tuple[int, ...], Any], Array]
) -> list[Array]:
    """Return XLA's arguments or results as arrays, without the ordering token."""
    found = [buffers.items[index].contents for index in range(buffers.length)]
    return [
        array(one.data or 0, tuple(one.dims[: one.rank]), DTYPES[one.dtype])
        for one in found
        if one.dtype != _TOKEN
    ]


def _answer(frame: Any) -> bool:
    """If XLA asks for the handler's version, write it; return whether XLA asked."""
    if not frame.extension:
        return False
    base = ctypes.cast(frame.extension, POINTER(_Extension)).contents
    if base.type != _METADATA:
        return False
    found = ctypes.cast(frame.extension, POINTER(_MetadataExtension)).contents
    own = found.metadata.contents.version
    # XLA refuses a handler of another major version. Newer minor versions add fields:
    # `_misfit` checks the sizes.
    own.major, own.minor = _found_version() or (-1, 0)
    return True


@ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
def _handle(pointer: Any) -> int | None:
    """Run an exchange in host memory."""
    return _carry_out(pointer, _array)


@ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
def _handle_on_gpu(pointer: Any) -> int | None:
    """Run an exchange in GPU memory, in order with XLA's stream."""
    return _carry_out(pointer, memory_at, _stream_of)


def _carry_out(pointer: Any, array: Any, stream_of: Any = None) -> int | None:
    """Run an exchange in a thread of XLA; return None, or an error object of XLA."""
    frame = pointer.contents
    try:
        if _answer(frame) or frame.stage != _EXECUTE:
            return None
        if problem := _misfit(frame):
            raise RuntimeError(f"{problem}; call it outside of jit")
        key = frame.attributes.items[0].contents.value[0]
        _exchanges[key](
            lambda: (_arrays(frame.arguments, array), _arrays(frame.results, array)),
            functools.partial(_postpone, pointer),
            None if stream_of is None else stream_of(frame),
        )
    except BaseException as error:
        # XLA calls this function from C, so it must return errors, and not raise them.
        return _error(frame.api.contents, error)
    return None


def _stream_of(frame: Any) -> int:
    """Return the stream that runs the program; 0 is CUDA's default stream."""
    size = ctypes.sizeof(_StreamArguments)
    arguments = _StreamArguments(size, None, frame.context)
    if frame.api.contents.stream_get(ctypes.byref(arguments)):
        raise RuntimeError("expected a stream from XLA, found that it has none here")
    return arguments.stream or 0


def _error(api: Any, error: BaseException) -> int:
    """Return an exception as an error object of XLA."""
    text = f"{type(error).__name__}: {error}".encode()
    size = ctypes.sizeof(_ErrorArguments)
    arguments = _ErrorArguments(size, None, text, _INTERNAL)
    made: int = api.error_create(ctypes.byref(arguments))
    return made


def _postpone(pointer: Any) -> Callable[[BaseException | None], None]:
    """Make XLA wait, without blocking a thread, until the returned function runs."""
    frame = ctypes.cast(pointer, POINTER(_LongFrame)).contents
    api = ctypes.cast(frame.known.api, POINTER(_LongApi)).contents
    # XLA's size of a frame excludes `future`, so check the size of the interface.
    if api.known.size < ctypes.sizeof(_LongApi):
        raise RuntimeError(
            "expected an XLA whose handlers may end later, found an older one, of jax "
            f"{jax.__version__}; upgrade it, or call it outside of jit"
        )
    arguments = _FutureArguments(ctypes.sizeof(_FutureArguments) - 8)
    api.future_create(ctypes.byref(arguments))
    frame.future = future = arguments.future

    def done(error: BaseException | None) -> None:
        given = _FutureArguments(ctypes.sizeof(_FutureArguments), None, future)
        if error is None:
            given.size -= 8
            api.future_set_available(ctypes.byref(given))
        else:
            given.error = _error(api.known, error)
            api.future_set_error(ctypes.byref(given))

    return done


@functools.cache
def register(target: str) -> str:
    """Register a handler with XLA, once; return an error text, empty for success.

    Call this function only when a handler is needed: if XLA refuses a handler while its
    backend starts, JAX has no backend.
    """
    problem = _version_problem()
    if not problem:
        handler, platform = _HANDLERS[target]
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform)
    return problem


_HANDLERS = {TARGET: (_handle, "cpu"), GPU_TARGET: (_handle_on_gpu, "CUDA")}
