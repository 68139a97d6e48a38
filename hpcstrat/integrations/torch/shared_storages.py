"""Moves DDP's buckets to shared memory, where other ranks of the node sum them.

DDP keeps a bucket of gradients for as long as it keeps the model. The first call with a
bucket moves the bucket's storage into shared memory, like a tensor in a queue of
torch.multiprocessing; later calls copy nothing.
"""

from __future__ import annotations

import os
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from hpcstrat.engine.algorithms.mapped_memory import LEAST_MAPPED_BYTES, MappedMemory

__all__ = ["share_storage"]

_FOLDER = "/dev/shm"
_SPARE_BYTES = 64 << 20


def share_storage(tensor: Any, areas: MappedMemory, num_ranks: int) -> None:
    """Move a tensor's storage to memory that other ranks can map; not collective.

    Does nothing if the storage cannot be moved. ``num_ranks`` is the number of ranks of
    the node that make this call; /dev/shm must have room for the storages of all.
    """
    storage = tensor.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if areas.off or areas.offers(address) or tensor.device.type != "cpu":
        return
    if not tensor.is_contiguous() or tensor.nbytes != nbytes:
        # The tensor is only a part of its storage.
        return
    # A storage that NumPy arrays refer to cannot be resized, and must not be moved.
    movable = storage.resizable() and not storage.is_shared()
    if nbytes < LEAST_MAPPED_BYTES or not movable or not _has_room(nbytes * num_ranks):
        return
    try:
        descriptor, nbytes = storage._share_fd_cpu_()
    except (RuntimeError, OSError):
        return
    reference = StorageWeakRef(storage)
    areas.offer(storage.data_ptr(), nbytes, descriptor, lambda: not reference.expired())


def _has_room(nbytes: int) -> bool:
    """Return whether /dev/shm has room; a write without room kills the process."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= 2 * nbytes + _SPARE_BYTES
