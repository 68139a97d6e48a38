"""Moves buckets of DDP to shared memory, where other ranks of the node add them up.

DDP keeps a bucket of gradients for as long as it keeps the model. At the first call
with a bucket, its storage is moved into shared memory, as a queue of
torch.multiprocessing does with a tensor; later calls copy nothing.
"""

from __future__ import annotations

import os
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from hpcstrat.engine.collectives.mapped_memory import LEAST_MAPPED_BYTES, MappedMemory

__all__ = ["share_storage"]

_FOLDER = "/dev/shm"
_SPARE_BYTES = 64 << 20


def share_storage(tensor: Any, areas: MappedMemory, num_ranks: int) -> None:
    """Move the storage of a tensor, and offer it to the other ranks; not collective.

    Does nothing where that is not possible. ``num_ranks`` of the node do the same.
    """
    storage = tensor.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if areas.off or areas.offers(address) or tensor.device.type != "cpu":
        return
    if not tensor.is_contiguous() or tensor.nbytes != nbytes:
        # The storage has other tensors, too.
        return
    # Memory that NumPy shows cannot be resized, and must not be moved.
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
    """Whether there is ample room: a write without room kills the process."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= 2 * nbytes + _SPARE_BYTES
