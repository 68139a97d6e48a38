"""Kernels in CUDA C++, which g++ compiles, and which run as loops."""

import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import tempfile

import numpy as np

from cupy import _queues, _standin, _submit
from cupy._errors import ILLEGAL_ADDRESS, INVALID_VALUE, CUDARuntimeError
from cupy.cuda import memory, runtime
from cupy.cuda import stream as _streams

_HEADER = pathlib.Path(__file__).with_name("_cuda_host.h")
_KERNEL = re.compile(
    r"__global__\s+(?:void\s+|__launch_bounds__\s*\([^)]*\)\s*)+(\w+)\s*\("
)
_TEMPLATE = re.compile(r"template\s*<[^{};]*>\s*(?:static\s+|inline\s+)*$")


class CompileException(Exception):
    """The source of a kernel does not compile."""

    def __init__(self, msg, source, name, options, backend="nvrtc"):
        self._msg = msg
        self.source = source
        self.name = name
        self.options = options
        self.backend = backend
        super().__init__(msg)

    def get_message(self):
        return self._msg


def _folder():
    root = os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()
    folder = pathlib.Path(root) / f"hpcstrat-standin-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _kernels(code):
    """Return the names of the kernels that are not templates."""
    found = []
    for match in _KERNEL.finditer(code):
        before = code[: match.start()].rstrip()
        before = re.sub(r'extern\s+"C"$', "", before).rstrip()
        if not _TEMPLATE.search(before[-500:]):
            found.append(match.group(1))
    return list(dict.fromkeys(found))


@functools.cache
def _library(code, definitions, expressions):
    names = {name: name for name in _kernels(code)}
    names |= {text: f"expression{i}" for i, text in enumerate(expressions)}
    lines = [f"_STANDIN_KERNEL({short}, {text})" for text, short in names.items()]
    header = _HEADER.read_text()
    first = '#line 1 "kernel.cu"'
    source = "\n".join([header, *definitions, first, code, *lines, ""])
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-w"]
    flags += ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]
    digest = hashlib.sha256("\0".join([source, *flags]).encode()).hexdigest()[:32]
    path = _folder() / f"{digest}.so"
    if not path.exists():
        _compile(source, flags, path)
    return ctypes.CDLL(str(path)), names


def _compile(source, flags, path):
    with path.with_suffix(".lock").open("w") as lock:
        # The ranks of a job need the same kernels: one rank compiles, the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile_alone(source, flags, path)


def _compile_alone(source, flags, path):
    # A process that is killed while it compiles leaves no partial library.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        text = pathlib.Path(folder) / "kernel.cpp"
        text.write_text(source)
        made = pathlib.Path(folder) / "kernel.so"
        command = ["g++", *flags, "-o", str(made), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileException(done.stderr, source, "kernel.cu", tuple(flags))
        made.rename(path)


def _definitions(options):
    """Return the preprocessor lines for the macro options."""
    lines = []
    for option in options:
        text = option.replace("--define-macro=", "-D")
        if text.startswith("-D"):
            name, _, value = text[2:].partition("=")
            lines.append(f"#define {name} {value or 1}")
        elif text.startswith("-U"):
            lines.append(f"#undef {text[2:]}")
    return tuple(lines)


def _check_reachable(device):
    current = runtime.getDevice()
    if device != current and (current, device) not in runtime._peers:
        raise CUDARuntimeError(ILLEGAL_ADDRESS)


def _argument(value):
    """Return an argument's bytes, and an object to keep until the kernel has run."""
    if _submit.is_array(value):
        _check_reachable(value.data.device_id)
        return value.data.ptr.to_bytes(8, "little"), value._host
    for kind, own in _SCALARS.items():
        if isinstance(value, kind):
            return own(value).tobytes(), None
    if isinstance(value, np.ndarray) and not value.ndim:
        return value.tobytes(), None
    if isinstance(value, memory.MemoryPointer):
        return value.ptr.to_bytes(8, "little"), value.mem._raw
    raise TypeError(f"Unsupported type {type(value)}")


# The order of the tests matters, because a NumPy scalar may also be a Python scalar.
_SCALARS = {
    np.generic: lambda value: value,
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}


class _Function:
    """A compiled kernel."""

    def __init__(self, library, short, name):
        self.name = name
        self._launch = library[f"_standin_launch_{short}"]
        sizes = (ctypes.c_int * 512)()
        number = library[f"_standin_sizes_{short}"](sizes)
        self._sizes = list(sizes[:number])

    def __call__(
        self,
        grid,
        block,
        args,
        shared_mem=0,
        stream=None,
        enable_cooperative_groups=False,
    ):
        packed = [_argument(value) for value in args]
        found = [len(data) for data, _ in packed]
        if found != self._sizes:
            raise TypeError(
                f"{self.name}: the kernel takes arguments of {self._sizes} bytes, "
                f"given are {found}"
            )
        grid, block = _three("grid", grid), _three("block", block)
        if block[0] * block[1] * block[2] > 1024:
            raise CUDARuntimeError(INVALID_VALUE)
        buffers = [ctypes.create_string_buffer(data, len(data)) for data, _ in packed]
        pointers = (ctypes.c_void_p * (len(buffers) or 1))(
            *(ctypes.addressof(buffer) for buffer in buffers)
        )
        held = [kept for _, kept in packed]
        sizes = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block)
        launch = self._launch

        def work():
            status = launch(*sizes, pointers)
            del held[:], buffers[:]
            if status:
                raise CUDARuntimeError(status)

        _standin.count("launches")
        ptr = (_streams.get_current_stream() if stream is None else stream).ptr
        _queues.find_queue(ptr).put(work)


def _three(name, sizes):
    if not isinstance(sizes, tuple):
        raise TypeError(
            f"Argument '{name}' has incorrect type (expected tuple, got "
            f"{type(sizes).__name__})"
        )
    return tuple(max(1, int(size)) for size in (*sizes, 1, 1)[:3])


def _check_type(name, value, kind):
    if not isinstance(value, kind):
        raise TypeError(
            f"Argument '{name}' has incorrect type (expected {kind.__name__}, got "
            f"{type(value).__name__})"
        )


class RawKernel:
    """A kernel of CUDA source code."""

    def __init__(
        self,
        code,
        name,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        *,
        enable_cooperative_groups=False,
        jitify=False,
    ):
        _check_type("code", code, str)
        _check_type("name", name, str)
        _check_type("options", options, tuple)
        self.code = code
        self.name = name
        self.options = options
        self.backend = backend
        self.enable_cooperative_groups = enable_cooperative_groups
        self.file_path = None
        self._expressions = ()

    @property
    def kernel(self):
        """The compiled kernel."""
        return _function(self.code, self.options, self._expressions, self.name)

    @property
    def max_threads_per_block(self):
        """The largest number of threads per block for this kernel."""
        return 1024

    @property
    def attributes(self):
        """The properties of the kernel that the compiler reports."""
        return {"max_threads_per_block": self.max_threads_per_block}

    def compile(self, log_stream=None):
        """Compile now instead of at the first launch."""
        _function(self.code, self.options, self._expressions, self.name)

    def __call__(self, grid, block, args, **kwargs):
        self.kernel(grid, block, args, **kwargs)


class RawModule:
    """Several kernels of one source."""

    def __init__(
        self,
        code=None,
        *,
        path=None,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        enable_cooperative_groups=False,
        name_expressions=None,
        jitify=None,
    ):
        if (code is None) == (path is None):
            raise TypeError(
                "Exactly one of `code` and `path` keyword arguments must be given."
            )
        if path is not None:
            raise NotImplementedError("the stand-in compiles sources only")
        _check_type("code", code, str)
        _check_type("options", options, tuple)
        self.code = code
        self.options = options
        self.backend = backend
        self.file_path = path
        self.enable_cooperative_groups = enable_cooperative_groups
        self.name_expressions = name_expressions

    def compile(self, log_stream=None):
        """Compile now instead of at the first use."""
        _library(self.code, _definitions(self.options), self._expressions)

    @property
    def _expressions(self):
        return tuple(self.name_expressions or ())

    def get_function(self, name):
        """Return a kernel by its name or name expression."""
        kernel = RawKernel(self.code, name, self.options, self.backend)
        kernel._expressions = self._expressions
        kernel.compile()
        return kernel


@functools.cache
def _function(code, options, expressions, name):
    _queues.visible()
    library, names = _library(code, _definitions(options), expressions)
    if name not in names:
        raise CUDADriverError(f"CUDA_ERROR_NOT_FOUND: named symbol not found: {name}")
    # A kernel is loaded at its first use, which may wait for all work of the device
    # (CUDA C++ Programming Guide, section "Lazy Loading").
    _queues.drain_device(_queues.current_device())
    return _Function(library, names[name], name)


class CUDADriverError(RuntimeError):
    """A call of the CUDA driver that failed."""
