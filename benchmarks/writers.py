"""Alternatives that save and load arrays, for bench_checkpoint.py."""

from __future__ import annotations

import importlib.util
import mmap
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs

__all__ = [
    "RAW_FILES",
    "RAW_SHARED",
    "Background",
    "Writer",
    "alternatives",
    "backgrounds",
    "drop_cache",
]

RAW_FILES = "raw, file per rank"
RAW_SHARED = "raw, shared file"
PIECE = 16 << 20

Array = np.ndarray[Any, Any]


class Writer(ABC):
    """A way to save and load arrays that are equal on all ranks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    arrays : dict of str to ndarray
        The arrays by name. Their sizes are multiples of the page size and of the number
        of ranks.
    """

    name = ""

    def __init__(self, comm: Any, arrays: dict[str, Array]):
        self.comm = comm
        self.arrays = arrays
        self.nbytes = sum(array.nbytes for array in arrays.values())

    @abstractmethod
    def save(self, path: Path) -> None:
        """Save all arrays, and flush them to the disk.

        Collective over the ranks.

        Parameters
        ----------
        path : Path
            A path that does not exist yet.
        """

    @abstractmethod
    def load(self, path: Path) -> None:
        """Load the arrays that `save` wrote.

        Collective over the ranks.

        Parameters
        ----------
        path : Path
            The path given to `save`.
        """


def flush(path: Path) -> None:
    """Flush a file to the disk.

    Not collective.

    Parameters
    ----------
    path : Path
        The file.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def drop_cache(path: Path) -> None:
    """Drop a file, or all files of a folder, from the page cache.

    Not collective.

    Parameters
    ----------
    path : Path
        The file or folder, flushed before.
    """
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Raw(Writer):
    """O_DIRECT writes of each rank's half from prepared memory, as a lower bound."""

    shared = False

    def __init__(self, comm: Any, arrays: dict[str, Array]):
        super().__init__(comm, arrays)
        self.name = RAW_SHARED if self.shared else RAW_FILES
        share = -(-self.nbytes // comm.size)
        self.share = share + -share % mmap.PAGESIZE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, self.share, flags=private)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.memory.write(bytes(self.share))
        self.start = comm.rank * self.share if self.shared else 0

    def _path(self, path: Path) -> Path:
        return path if self.shared else path.with_name(f"{path.name}.{self.comm.rank}")

    def save(self, path: Path) -> None:
        """See `Writer`."""
        if self.shared:
            if self.comm.rank == 0:
                handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)
                os.posix_fallocate(handle, 0, self.share * self.comm.size)
                os.close(handle)
            self.comm.Barrier()
        flags = os.O_CREAT | os.O_WRONLY | os.O_DIRECT
        handle = os.open(self._path(path), flags, 0o666)
        view = memoryview(self.memory)
        for low in range(0, self.share, PIECE):
            os.pwrite(handle, view[low : low + PIECE], self.start + low)
        os.fsync(handle)
        os.close(handle)
        view.release()

    def load(self, path: Path) -> None:
        """See `Writer`."""
        handle = os.open(self._path(path), os.O_RDONLY | os.O_DIRECT)
        view = memoryview(self.memory)
        for low in range(0, self.share, PIECE):
            os.preadv(handle, [view[low : low + PIECE]], self.start + low)
        os.close(handle)
        view.release()


class RawShared(Raw):
    """O_DIRECT writes of each rank's half as in `Raw`, into one shared file."""

    shared = True


class _OneRank(Writer):
    """A writer with which rank 0 saves, and every rank loads all arrays."""

    suffix = ""

    def save(self, path: Path) -> None:
        """See `Writer`."""
        if self.comm.rank == 0:
            written = path.with_name(path.name + self.suffix)
            self._write(written)
            flush(written)
        self.comm.Barrier()

    def load(self, path: Path) -> None:
        """See `Writer`."""
        self._read(path.with_name(path.name + self.suffix))

    @abstractmethod
    def _write(self, path: Path) -> None:
        """Write all arrays."""

    @abstractmethod
    def _read(self, path: Path) -> None:
        """Read all arrays."""


class GatherH5py(_OneRank):
    """Rank 0 gathers every array from parts of the ranks, and writes it with h5py."""

    name = "h5py, rank 0 after a gather"
    suffix = ".h5"

    def save(self, path: Path) -> None:
        """See `Writer`."""
        self.gathered = {}
        for name, array in self.arrays.items():
            part = np.array_split(array.reshape(-1), self.comm.size)[self.comm.rank]
            whole = np.empty_like(array) if self.comm.rank == 0 else None
            self.comm.Gather(part, whole)
            self.gathered[name] = whole
        super().save(path)
        self.gathered = {}

    def _write(self, path: Path) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            for name, array in self.gathered.items():
                file.create_dataset(name, data=array)

    def _read(self, path: Path) -> None:
        import h5py

        with h5py.File(path, "r") as file:
            for name, array in self.arrays.items():
                file[name].read_direct(array)


class PlainH5py(GatherH5py):
    """Rank 0 writes its own copy of every array with h5py."""

    name = "h5py, rank 0"

    def save(self, path: Path) -> None:
        """See `Writer`."""
        self.gathered = self.arrays
        _OneRank.save(self, path)


class Savez(_OneRank):
    """Rank 0 writes NumPy's ``.npz`` format."""

    name = "np.savez, rank 0"
    suffix = ".npz"

    def _write(self, path: Path) -> None:
        np.savez(path, **self.arrays)  # type: ignore[arg-type]

    def _read(self, path: Path) -> None:
        with np.load(path) as file:
            for name, array in self.arrays.items():
                array[...] = file[name]


class TorchSave(_OneRank):
    """Tensors that share the arrays' memory, saved by torch."""

    name = "torch.save, rank 0"
    suffix = ".pt"

    def _write(self, path: Path) -> None:
        import torch

        tensors = {name: torch.from_numpy(a) for name, a in self.arrays.items()}
        torch.save(tensors, path)

    def _read(self, path: Path) -> None:
        import torch

        loaded = torch.load(path, weights_only=True)
        for name, array in self.arrays.items():
            array[...] = loaded[name].numpy()


class TorchDistributed(Writer):
    """torch.distributed.checkpoint over gloo, which flushes its files by default."""

    name = "torch DCP"

    def _tensors(self) -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    def save(self, path: Path) -> None:
        """See `Writer`."""
        from torch.distributed import checkpoint

        checkpoint.save(self._tensors(), checkpoint_id=str(path))

    def load(self, path: Path) -> None:
        """See `Writer`."""
        from torch.distributed import checkpoint

        checkpoint.load(self._tensors(), checkpoint_id=str(path))


class Background(ABC):
    """A way to save while the program continues.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    arrays : dict of str to ndarray
        By name.
    """

    name = ""

    def __init__(self, comm: Any, arrays: dict[str, Array]):
        self.comm = comm
        self.arrays = arrays

    @abstractmethod
    def start(self, path: Path) -> None:
        """Start a save; the program may change the arrays after the return.

        Collective over the ranks.

        Parameters
        ----------
        path : Path
            A path that does not exist yet.
        """

    @abstractmethod
    def busy(self) -> bool:
        """Return whether this rank's save is still in progress.

        Not collective.

        Returns
        -------
        bool
            False before the first save.
        """

    def wait(self) -> None:
        """Wait until the current save has ended.

        Collective over the ranks.
        """
        while self.busy():
            time.sleep(0.001)
        self.comm.Barrier()


class H5pyThread(Background):
    """Rank 0 copies its arrays, and a thread writes and flushes them with h5py."""

    name = "h5py in a thread of rank 0"

    def __init__(self, comm: Any, arrays: dict[str, Array]):
        super().__init__(comm, arrays)
        self.copies = {n: np.zeros_like(a) for n, a in arrays.items() if not comm.rank}
        self.thread = threading.Thread()

    def start(self, path: Path) -> None:
        """See `Background`."""
        if self.comm.rank:
            return
        for name, copy in self.copies.items():
            copy[...] = self.arrays[name]
        self.thread = threading.Thread(target=self._write, args=(path,))
        self.thread.start()

    def _write(self, path: Path) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            for name, array in self.copies.items():
                file.create_dataset(name, data=array)
        flush(path)

    def busy(self) -> bool:
        """See `Background`."""
        return self.thread.is_alive()


class TorchAsync(Background):
    """torch.distributed.checkpoint's async_save over gloo, in a thread."""

    name = "torch DCP async_save"
    future: Any = None

    def start(self, path: Path) -> None:
        """See `Background`."""
        import torch
        from torch.distributed import checkpoint

        tensors = {name: torch.from_numpy(a) for name, a in self.arrays.items()}
        self.future = checkpoint.async_save(tensors, checkpoint_id=str(path))

    def busy(self) -> bool:
        """See `Background`."""
        return self.future is not None and not self.future.done()


class Orbax(_OneRank):
    """Orbax in one process."""

    name = "Orbax, rank 0"

    def save(self, path: Path) -> None:
        """See `Writer`."""
        if self.comm.rank == 0:
            self._write(path)
        self.comm.Barrier()

    def _write(self, path: Path) -> None:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path.absolute(), self.arrays)

    def _read(self, path: Path) -> None:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            loaded = checkpointer.restore(path.absolute())
        for name, array in self.arrays.items():
            array[...] = loaded[name]


def backgrounds(comm: Any, arrays: dict[str, Array], gloo: Any) -> list[Background]:
    """Return the asynchronous savers whose libraries are installed.

    Not collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    arrays : dict of str to ndarray
        The arrays to save.
    gloo : module or None
        ``torch.distributed``, see `gloo.start_gloo`.

    Returns
    -------
    list of Background
        The savers, in no particular order.
    """
    kinds: list[type[Background]] = [H5pyThread]
    if gloo is not None:
        kinds.append(TorchAsync)
    return [kind(comm, arrays) for kind in kinds]


def remove(path: Path) -> None:
    """Remove all files and folders whose path begins with a writer's path.

    Not collective.

    Parameters
    ----------
    path : Path
        The path that the writer was called with.
    """
    for found in path.parent.glob(f"{path.name}*"):
        shutil.rmtree(found) if found.is_dir() else found.unlink()


def alternatives(
    strategy: hs.MultiWorkerMirroredStrategy, arrays: dict[str, Array], gloo: Any
) -> list[Writer]:
    """Return the alternatives whose libraries are installed.

    Collective over all replicas.

    Parameters
    ----------
    strategy : hpcstrat strategy
        The replicas of this strategy take part.
    arrays : dict of str to ndarray
        The arrays to save; loads overwrite them with the same values.
    gloo : module or None
        ``torch.distributed``, see `gloo.start_gloo`.

    Returns
    -------
    list of Writer
        The alternatives, with `Raw` and `RawShared` first.
    """
    comm = strategy.topology.replica_comm
    kinds: list[type[Writer]] = [Raw, RawShared, PlainH5py, GatherH5py, Savez]
    if gloo is not None:
        kinds += [TorchSave, TorchDistributed]
    orbax = importlib.util.find_spec("orbax") is not None
    if comm.allreduce(orbax, op=strategy.topology.mpi.LAND):
        kinds.append(Orbax)
    return [kind(comm, arrays) for kind in kinds]
