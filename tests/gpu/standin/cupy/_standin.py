"""Counters and switches of the stand-in: not part of CuPy's interface.

Tests read ``cupy._standin.counts``. These variables of the environment are read once:
``HPCSTRAT_STANDIN_DELAY`` (longest random delay before an operation, in seconds),
``HPCSTRAT_STANDIN_SEED`` (seed of these delays), ``HPCSTRAT_STANDIN_DEVICES`` (number
of devices of the machine), ``HPCSTRAT_STANDIN_NO_DEVICE`` (1: a machine without
devices), ``HPCSTRAT_STANDIN_DRIVER`` (the driver's version, such as 12090; 0: there is
none); ``cuda/nccl.py`` describes those of NCCL.
"""

import dataclasses
import os
import random
import threading
import time

POISON = 0xCB
"""The byte that fills memory which no operation has written yet."""

longest_delay = float(os.environ.get("HPCSTRAT_STANDIN_DELAY", "0.0005"))
"""Operations start after a random delay of at most so many seconds."""

_random = random.Random(int(os.environ.get("HPCSTRAT_STANDIN_SEED", "0")))
_lock = threading.Lock()


@dataclasses.dataclass
class Counts:
    """Counts of this process's calls for devices since the last ``reset``.

    Attributes
    ----------
    launches : int
        Kernels of ``RawKernel`` and ``RawModule``.
    operations : int
        Array operations of the stand-in itself (CuPy launches kernels for them).
    stream_synchronizations, device_synchronizations, event_synchronizations : int
        Calls that made the host wait, including implied waits (``int(array)``).
    host_to_device, device_to_host, device_to_device : int
        Copies.
    host_to_device_bytes, device_to_host_bytes, device_to_device_bytes : int
        Bytes of these copies.
    pageable : int
        Copies between a device and host memory that is not page-locked.
    collectives : int
        Calls of NCCL that were started, messages included.
    allocations, pinned_allocations : int
        Blocks taken from the device and page-locked on the host.
    """

    launches: int = 0
    operations: int = 0
    stream_synchronizations: int = 0
    device_synchronizations: int = 0
    event_synchronizations: int = 0
    host_to_device: int = 0
    host_to_device_bytes: int = 0
    device_to_host: int = 0
    device_to_host_bytes: int = 0
    device_to_device: int = 0
    device_to_device_bytes: int = 0
    pageable: int = 0
    collectives: int = 0
    allocations: int = 0
    pinned_allocations: int = 0

    @property
    def synchronizations(self) -> int:
        """The sum of all three kinds of synchronization."""
        return (
            self.stream_synchronizations
            + self.device_synchronizations
            + self.event_synchronizations
        )


counts = Counts()


def count(name, number=1):
    """Add to one of the counts; any thread may call it."""
    with _lock:
        setattr(counts, name, getattr(counts, name) + number)


def count_copy(kind, nbytes):
    """Count a copy of ``kind``, for example ``host_to_device``."""
    with _lock:
        setattr(counts, kind, getattr(counts, kind) + 1)
        total = f"{kind}_bytes"
        setattr(counts, total, getattr(counts, total) + nbytes)


def reset():
    """Set all counts to zero, in the same object."""
    with _lock:
        for field in dataclasses.fields(counts):
            setattr(counts, field.name, 0)


def pause():
    """Wait for a random time, like a device that is not ready at once."""
    with _lock:
        seconds = _random.random() * longest_delay
    if seconds > 0:
        time.sleep(seconds)


def driver_version():
    """Return the CUDA version that the driver supports; 0 without a driver."""
    return int(os.environ.get("HPCSTRAT_STANDIN_DRIVER", "12090"))


def physical_devices():
    """Return the numbers of the devices that this process may see."""
    if os.environ.get("HPCSTRAT_STANDIN_NO_DEVICE", "0") not in {"", "0"}:
        return []
    total = int(os.environ.get("HPCSTRAT_STANDIN_DEVICES", "1"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(total))
    found = []
    for part in visible.split(","):
        # CUDA reads the list up to the first entry that names no device.
        text = part.strip()
        if not text.isdigit() or int(text) >= total:
            break
        found.append(int(text))
    return found
