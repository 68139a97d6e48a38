"""Buckets of DDP, put where the other ranks of the node can add them up in place.

DDP keeps a bucket of gradients for as long as it keeps the model. The first time that
one comes, its storage is moved into shared memory, as a queue of torch.multiprocessing
does with each tensor that is put there; from then on nothing of it is copied.
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

    Where that cannot be, nothing happens. ``num_ranks`` of the node do the same now.
    """
    storage = tensor.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if areas.off or areas.offers(address) or tensor.device.type != "cpu":
        return
    if not tensor.is_contiguous() or tensor.nbytes != nbytes:
        # A part of something else.
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
    """Whether there is far more room: a write past the end of it kills the process."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= 2 * nbytes + _SPARE_BYTES
