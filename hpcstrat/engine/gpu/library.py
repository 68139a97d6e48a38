"""CuPy: its import, its versions, and the GPUs that it shows to this process."""

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
# cudaErrorInsufficientDriver.
_INSUFFICIENT_DRIVER = 35


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of CuPy and of its libraries; empty for a missing one."""

    cupy: str
    # The CUDA version that the driver is for.
    driver: str
    runtime: str
    nccl: str

    @property
    def driver_too_old(self) -> bool:
        """Whether there is a driver, for an earlier CUDA than CuPy is built for."""
        driver, runtime = (
            text.partition(".")[0] for text in (self.driver, self.runtime)
        )
        return bool(driver and runtime) and int(driver) < int(runtime)


# The warnings of CuPy that were logged.
_logged: set[str] = set()


def is_loaded() -> bool:
    """Whether this process has imported CuPy."""
    return "cupy" in sys.modules


def is_installed() -> bool:
    """Whether CuPy is installed; it may still fail to load."""
    return is_loaded() or importlib.util.find_spec("cupy") is not None


def _quietly(make: Callable[[], Any]) -> Any:
    """Call a function that may warn; log its warnings once, at level INFO.

    CuPy warns of libraries that it does not find. Most programs need none of them, and
    would end where they turn warnings into errors.
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
    """Return the module, or raise an error that says how to install it."""
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
    """Return CuPy, with at least one GPU to compute on; raise TopologyError without."""
    module = _cupy()
    if reason := why_no_gpu():
        raise TopologyError(
            f"expected a GPU for this process, found {reason}; ask the launcher for "
            "GPUs (sbatch --gpus-per-node=...), and look at "
            f"{_VISIBLE} and nvidia-smi on the compute node"
        )
    return module


def why_no_gpu() -> str:
    """Say why this process has no GPU; empty if it has one. Loads CuPy."""
    try:
        module = _cupy()
        count = module.cuda.runtime.getDeviceCount()
    except TopologyError as error:
        said = str(error).partition("found that it ")[2].rpartition(";")[0]
        return f"CuPy {said}"
    except Exception as error:
        # The class of CuPy's errors has no name here: CuPy may not be loaded.
        if getattr(error, "status", 0) == _INSUFFICIENT_DRIVER:
            return _why_not_with_the_driver(module.cuda.runtime)
        return f"no CUDA device: {error}{_visibility()}"
    return "" if count else f"no CUDA device{_visibility()}"


def _why_not_with_the_driver(runtime: Any) -> str:
    """Say which driver CUDA calls insufficient; there may be none."""
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
    """Return the GPUs of this process in the order of their numbers. Loads CuPy.

    None where there is no CuPy or no driver.
    """
    if why_no_gpu():
        return []
    runtime = _cupy().cuda.runtime
    # A process that has a part of a GPU (MIG) sees that alone. The variable names the
    # part; not every version of CUDA gives it an identity of its own.
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
    """Return this thread's GPU: number 0 unless the program has chosen another."""
    return int(_cupy().cuda.runtime.getDevice())


def use(number: int) -> None:
    """Make the calling thread compute on a GPU, and the process have its context.

    CUDA keeps this by thread: helper threads that touch arrays call it, too.
    """
    module = _cupy()
    module.cuda.Device(number).use()
    # Before CUDA 12 a context comes with the first call that needs it, such as this.
    module.cuda.runtime.free(0)


def free_bytes(gpu: Gpu) -> int:
    """Return how much of a GPU's memory is free; -1 where CUDA raises an error.

    That is so if the GPU has failed, or another process has it alone. Starts to use the
    GPU, which takes some of its memory.
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
    """Return the versions in use; raise TopologyError without CuPy. Loads it."""
    module, library = _cupy(), nccl()
    runtime = module.cuda.runtime
    return Versions(
        cupy=str(module.__version__),
        driver=_version(runtime.driverGetVersion),
        runtime=_version(runtime.runtimeGetVersion),
        nccl="" if library is None else _nccl_version(library),
    )


def _version(ask: Callable[[], int]) -> str:
    """Return 12.9 for CUDA's 12090; empty without a version."""
    try:
        number = int(ask())
    except Exception:
        # CUDA raises an error where there is no driver.
        return ""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


def _nccl_version(library: Any) -> str:
    """Return NCCL's version, which counts 22706 since 2.9, and 2804 before."""
    number = int(library.get_version())
    unit = 10000 if number >= 10000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
