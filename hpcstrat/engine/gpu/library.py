"""Imports CuPy, and returns its versions and the GPUs that this process sees."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.topology.rank_gpu import Gpu
from hpcstrat.errors import TopologyError

__all__ = [
    "Gpu",
    "Versions",
    "current_gpu",
    "free_bytes",
    "is_installed",
    "is_loaded",
    "load",
    "nccl",
    "use",
    "versions",
    "visible_gpus",
    "why_no_gpu",
]

_EXTRAS = "hpcstrat's extra cuda12 or cuda13, whichever the driver's CUDA is"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# CUDA's error code cudaErrorInsufficientDriver.
_INSUFFICIENT_DRIVER = 35


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of CuPy and of its libraries; an empty string for a missing library."""

    cupy: str
    # The latest CUDA version that the driver supports.
    driver: str
    runtime: str
    nccl: str

    @property
    def driver_too_old(self) -> bool:
        """True if the driver supports only earlier CUDA versions than CuPy's."""
        driver, runtime = (
            text.partition(".")[0] for text in (self.driver, self.runtime)
        )
        return bool(driver and runtime) and int(driver) < int(runtime)


# CuPy's warnings that have been logged.
_logged: set[str] = set()


def is_loaded() -> bool:
    """Return whether this process has imported CuPy."""
    return "cupy" in sys.modules


def is_installed() -> bool:
    """Return whether CuPy is installed; its import may still fail."""
    return is_loaded() or importlib.util.find_spec("cupy") is not None


def _quietly(make: Callable[[], Any]) -> Any:
    """Call a function, and log its Python warnings once, at level INFO.

    CuPy warns about optional libraries that it does not find. Most programs do not need
    these libraries, and a program that turns warnings into errors would fail.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = make()
    for warning in caught:
        text = _in_one_line(str(warning.message), " *-")
        if text not in _logged:
            _logged.add(text)
            get_logger("device").info("CuPy warns: %s", text)
    return found


def _cupy() -> Any:
    """Import CuPy, or raise TopologyError with the command to install it."""
    try:
        return _quietly(lambda: importlib.import_module("cupy"))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cupy":
            raise _broken(error) from error
        raise TopologyError(
            f"expected CuPy for arrays on GPUs, found that it is not installed; "
            f"install {_EXTRAS}"
        ) from error
    except ImportError as error:
        raise _broken(error) from error


def _broken(error: Exception) -> TopologyError:
    return TopologyError(
        "expected CuPy to be usable, found that it cannot be imported: "
        f"{_in_one_line(str(error), ' =')[:400]}; reinstall it as {_EXTRAS}"
    )


def _in_one_line(text: str, marks: str) -> str:
    lines = [line.strip(marks) for line in text.splitlines()]
    return " ".join(line for line in lines if line)


def load() -> Any:
    """Return the CuPy module; raise TopologyError if CuPy or a GPU is missing."""
    module = _cupy()
    if reason := why_no_gpu():
        raise TopologyError(
            f"expected a GPU for this process, found {reason}; ask the launcher for "
            "GPUs (sbatch --gpus-per-node=...), and look at "
            f"{_VISIBLE} and nvidia-smi on the compute node"
        )
    return module


def why_no_gpu() -> str:
    """Return why this process has no GPU, or an empty string. Loads CuPy."""
    try:
        module = _cupy()
        count = module.cuda.runtime.getDeviceCount()
    except TopologyError as error:
        said = str(error).partition("found that it ")[2].rpartition(";")[0]
        return f"CuPy {said}"
    except Exception as error:
        # CuPy's exception class cannot be named here, because CuPy may not be loaded.
        if getattr(error, "status", 0) == _INSUFFICIENT_DRIVER:
            return _why_not_with_the_driver(module.cuda.runtime)
        return f"no CUDA device: {error}{_visibility()}"
    return "" if count else f"no CUDA device{_visibility()}"


def _why_not_with_the_driver(runtime: Any) -> str:
    """Return the reason for CUDA's error "insufficient driver"."""
    driver = _version(runtime.driverGetVersion)
    if not driver:
        return "no driver of NVIDIA on this host"
    return (
        f"a driver for CUDA {driver}, too old for this CuPy, which is built for CUDA "
        f"{_version(runtime.runtimeGetVersion)} (install {_EXTRAS})"
    )


def _visibility() -> str:
    value = os.environ.get(_VISIBLE)
    return "" if value is None else f" ({_VISIBLE}={value!r})"


def visible_gpus() -> list[Gpu]:
    """Return the GPUs of this process in the order of their CUDA numbers. Loads CuPy.

    The list is empty without CuPy or without a driver.
    """
    if why_no_gpu():
        return []
    runtime = _cupy().cuda.runtime
    # A process with a MIG instance sees only that instance. The instance's name in
    # CUDA_VISIBLE_DEVICES is added to the UUID, because some CUDA versions report the
    # same UUID for all MIG instances of a GPU.
    part = os.environ.get(_VISIBLE, "").partition(",")[0]
    part = part if part.upper().startswith("MIG") else ""
    return [_gpu(runtime, index, part) for index in range(runtime.getDeviceCount())]


def _gpu(runtime: Any, index: int, part: str) -> Gpu:
    properties = runtime.getDeviceProperties(index)
    name, uuid = properties.get("name", b""), properties.get("uuid", b"")
    return Gpu(
        index=index,
        pci_bus_id=_text(runtime.deviceGetPCIBusId(index)),
        uuid=(uuid.hex() if isinstance(uuid, bytes) else str(uuid)) + part,
        name=_text(name),
        memory_bytes=int(properties.get("totalGlobalMem", 0)),
        compute_capability=f"{properties.get('major', 0)}.{properties.get('minor', 0)}",
    )


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def current_gpu() -> int:
    """Return the CUDA number of this thread's current GPU (default: 0)."""
    return int(_cupy().cuda.runtime.getDevice())


def use(number: int) -> None:
    """Make a GPU current for the calling thread, and create its CUDA context.

    CUDA has a current GPU per thread, so helper threads that use arrays must also call
    this function.
    """
    module = _cupy()
    module.cuda.Device(number).use()
    # Before CUDA 12, only a call that needs the context creates it, such as ``free``.
    module.cuda.runtime.free(0)


def free_bytes(gpu: Gpu) -> int:
    """Return the free bytes of a GPU's memory, or -1 if CUDA raises an error.

    CUDA raises an error if the GPU has failed, or another process has exclusive access.
    The call creates a CUDA context, which uses some memory of the GPU.
    """
    runtime = _cupy().cuda.runtime
    try:
        before = runtime.getDevice()
        runtime.setDevice(gpu.index)
        free = int(runtime.memGetInfo()[0])
        runtime.setDevice(before)
    except Exception:
        return -1
    return free


def nccl() -> Any:
    """Return CuPy's NCCL module, or None if there is no NCCL library. Loads CuPy."""
    module = _cupy()
    try:
        found = _quietly(
            lambda: importlib.import_module(f"{module.__name__}.cuda.nccl")
        )
    except ImportError:
        return None
    return found if getattr(found, "available", False) else None


def versions() -> Versions:
    """Return the versions in use; raise TopologyError without CuPy. Loads CuPy."""
    module, library = _cupy(), nccl()
    runtime = module.cuda.runtime
    return Versions(
        cupy=str(module.__version__),
        driver=_version(runtime.driverGetVersion),
        runtime=_version(runtime.runtimeGetVersion),
        nccl="" if library is None else _nccl_version(library),
    )


def _version(ask: Callable[[], int]) -> str:
    """Return a CUDA version as text, such as 12.9 for 12090; empty if unknown."""
    try:
        number = int(ask())
    except Exception:
        # CUDA raises an error if there is no driver.
        return ""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _nccl_version(library: Any) -> str:
    """Return NCCL's version as text, such as 2.27.6 for 22706, or 2.8.4 for 2804."""
    number = int(library.get_version())
    unit = 10000 if number >= 10000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
