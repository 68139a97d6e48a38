"""Benchmark of reading rows of HDF5 files in several orders, with alternatives.

Run it on a quiet machine with two cores, as root to measure cold files, too::

    export OMP_NUM_THREADS=1
    mpirun -n 1 python benchmarks/bench_input.py --folder FOLDER --json FILE
    mpirun -n 2 python benchmarks/bench_input.py --folder FOLDER --json FILE

The first run writes the files: 1 GiB of rows of 4 KiB, contiguous; and 256 MiB of a
smooth field in chunks of 64 rows, compressed by gzip with shuffling, by zstd with
shuffling, and by blosc, which shuffles by itself. ``--files zstd,blosc`` compares only
the alternatives that read these files. Each alternative
reads batches of 256 rows, and each rank reads its part of a batch: `hpcstrat.Dataset`,
without and with prefetching; plain ``preadv`` of the same rows, merged into runs; h5py
by hand; with one rank also torch's DataLoader over h5py with two workers, if it is
installed. The alternatives run in turn, round after round. Another part times the third
epoch of the compressed file, cached and shuffled, when rows are in memory; and reports
the share of rows in memory, with and without ``own_rows``. The last part trains in
steps of 5 ms of matrix products, and reports the share of the steps' time that was
spent waiting for batches, without the first step.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
from report import row, write_json

import hpcstrat as hs

NUM_ROWS, WIDTH, BATCH = 1 << 18, 1024, 256
PACKED_ROWS, CHUNK_ROWS = 1 << 16, 64
ROW_BYTES = 4 * WIDTH
# Rows per block, and number of mixed blocks; a block of a compressed file is a chunk.
BLOCKS = {"contiguous": (16, 16)}
PACKED_BLOCKS = CHUNK_ROWS, 4
AHEAD = 4
STEP_SECONDS = 5e-3


def packings() -> dict[str, Any]:
    """Return the options of the compressed files, by their names."""
    import hdf5plugin

    return {
        "gzip": {"compression": "gzip", "shuffle": True},
        "zstd": {"shuffle": True, **hdf5plugin.Zstd()},
        "blosc": {**hdf5plugin.Blosc()},
    }


def make_files(folder: Path, names: list[str]) -> dict[str, Path]:
    """Write the data files that are missing; return the paths of all."""
    paths = {name: folder / f"{name}.h5" for name in names}
    rng = np.random.default_rng(0)
    if "contiguous" in paths and not paths["contiguous"].exists():
        with h5py.File(paths["contiguous"], "w") as file:
            data = file.create_dataset("x", (NUM_ROWS, WIDTH), "f4")
            for start in range(0, NUM_ROWS, 8192):
                data[start : start + 8192] = rng.random((8192, WIDTH), np.float32)
    for name, options in packings().items():
        if name not in paths or paths[name].exists():
            continue
        with h5py.File(paths[name], "w") as file:
            shape, chunks = (PACKED_ROWS, WIDTH), (CHUNK_ROWS, WIDTH)
            data = file.create_dataset("x", shape, "f4", chunks=chunks, **options)
            # Write a smooth field whose last bits of the mantissa are rounded off.
            waves = np.linspace(0, 6 * np.pi, WIDTH)
            for start in range(0, PACKED_ROWS, 4096):
                phase = np.arange(start, start + 4096)[:, np.newaxis] / 500
                field = 280 + 20 * np.sin(waves + phase) + rng.normal(size=(4096, 1))
                data[start : start + 4096] = np.round(field.astype("f4") * 64) / 64
    return paths


def forget() -> None:
    """Drop all files from the kernel's page cache; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


@dataclass(frozen=True)
class Reader:
    """An alternative that yields a rank's batches of a file in some order."""

    name: str
    batches: Callable[[], Iterator[Any]]
    num_rows: int


def distributed(strategy: Any, path: Path, order: str, ahead: int) -> Iterator[Any]:
    """Return an iterator of this rank's batches, read by `hpcstrat.Dataset`."""
    dataset = hs.Dataset.from_files(path, "x")
    if order == "blocks":
        block, window = BLOCKS.get(path.stem, PACKED_BLOCKS)
        dataset = dataset.shuffle(blocks=block, window=window)
    elif order == "shuffled":
        dataset = dataset.shuffle()
    batches = dataset.batch(BATCH).prefetch(ahead)
    return map(strategy.local_value, strategy.experimental_distribute_dataset(batches))


def order_of(path: Path, order: str) -> Callable[[int], Any]:
    """Return a function that returns the row numbers of the batch at a position."""
    dataset = hs.Dataset.from_files(path, "x")
    if order == "in order":
        return lambda start: np.arange(start, start + BATCH)
    block, window = BLOCKS.get(path.stem, PACKED_BLOCKS)
    how = {"blocks": block, "window": window} if order == "blocks" else {}
    shuffled: Any = dataset.shuffle(**how).stage
    return lambda start: shuffled.rows(slice(start, start + BATCH), 0)


def own_part(rows: Any, strategy: Any) -> Any:
    """Return this rank's part of a batch, in increasing order."""
    count, replica = strategy.num_replicas_in_sync, strategy.replica_id
    size = -(-len(rows) // count)
    return np.sort(rows[replica * size : (replica + 1) * size])


def runs_of(rows: Any) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of consecutive rows."""
    ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    start = 0
    for end in ends:
        yield start, end
        start = end


def plain(strategy: Any, path: Path, order: str, num_rows: int) -> Iterator[Any]:
    """Read the batches by ``preadv``, one run of rows per call."""
    with h5py.File(path, "r", locking=False) as file:
        offset = file["x"].id.get_offset()
    rows_at = order_of(path, order)
    fd = os.open(path, os.O_RDONLY)
    try:
        for start in range(0, num_rows, BATCH):
            rows = own_part(rows_at(start), strategy)
            out = np.empty((len(rows), WIDTH), np.float32)
            for first, last in runs_of(rows):
                os.preadv(fd, [out[first:last]], offset + int(rows[first]) * ROW_BYTES)
            yield out
    finally:
        os.close(fd)


def by_hand(strategy: Any, path: Path, order: str, num_rows: int) -> Iterator[Any]:
    """Read the batches by h5py, as slices or as lists of rows."""
    rows_at = order_of(path, order)
    with h5py.File(path, "r", locking=False) as file:
        data = file["x"]
        for start in range(0, num_rows, BATCH):
            rows = own_part(rows_at(start), strategy)
            is_run = rows[-1] - rows[0] == len(rows) - 1
            yield data[rows[0] : rows[-1] + 1] if is_run else data[rows]


class Rows:
    """A map-style dataset over h5py, opened in each worker."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: Any = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        """Return a row."""
        if self._data is None:
            self._data = h5py.File(self._path, "r", locking=False)["x"]
        return self._data[index]


def by_torch(path: Path, order: str) -> Iterator[Any]:
    """Read the batches by torch's DataLoader with two workers."""
    from torch.utils.data import DataLoader

    return iter(
        DataLoader(
            Rows(path),  # type: ignore[arg-type]
            batch_size=BATCH,
            shuffle=order == "shuffled",
            num_workers=2,
            multiprocessing_context="spawn",
        )
    )


def timed(comm: Any, reader: Reader, is_cold: bool) -> tuple[float, float, int]:
    """Return seconds, CPU seconds of this rank, and rows of all ranks, for a reader."""
    if is_cold and not comm.rank:
        forget()
    batches = reader.batches()
    if reader.name == "torch":
        # Exclude the first batch, with which torch starts its workers.
        next(batches)
    comm.Barrier()
    began, used = time.perf_counter(), time.process_time()
    done = 0
    for batch in batches:
        done += len(batch)
        if done * comm.size >= reader.num_rows:
            break
    used = time.process_time() - used
    seconds = comm.allreduce(time.perf_counter() - began, op=_mpi().MAX)
    del batches
    return seconds, used, comm.allreduce(done)


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def ways(
    strategy: Any, paths: dict[str, Path], file: str, order: str, num_rows: int
) -> list[Reader]:
    """Return the alternatives that read a file in some order."""
    path = paths[file]
    made = [
        Reader(
            f"hpcstrat, {ahead} ahead",
            lambda ahead=ahead: distributed(strategy, path, order, ahead),  # type: ignore[misc]
            num_rows,
        )
        for ahead in (0, AHEAD)
    ]
    if file == "contiguous":
        made.append(
            Reader("preadv", lambda: plain(strategy, path, order, num_rows), num_rows)
        )
    made.append(
        Reader("h5py", lambda: by_hand(strategy, path, order, num_rows), num_rows)
    )
    if file == "contiguous" and strategy.num_replicas_in_sync == 1 and _has_torch():
        made.append(Reader("torch", lambda: by_torch(path, order), num_rows))
    return made


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def waiting(strategy: Any, path: Path, order: str, ahead: int) -> tuple[float, float]:
    """Return the seconds of a step, and the share of time spent waiting for batches.

    The first step is excluded, because no batch can have been prefetched for it.
    """
    matrix = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype("f4")
    steps, waits = [], []
    batches = distributed(strategy, path, order, ahead)
    while len(steps) < 200:
        began = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter()
        while time.perf_counter() - waited < STEP_SECONDS:
            batch @ matrix[:, :64]
        steps.append(time.perf_counter() - began)
        waits.append(waited - began)
    del steps[0], waits[0]
    return float(np.median(steps)), float(np.sum(waits) / np.sum(steps))


def compare(
    strategy: Any,
    paths: dict[str, Path],
    file: str,
    order: str,
    *,
    rounds: int,
    is_cold: bool,
) -> list[dict[str, Any]]:
    """Time all alternatives that read a file in some order."""
    comm = strategy.topology.replica_comm
    count = 1 << (13 if order == "shuffled" else 17 if file == "contiguous" else 16)
    readers = ways(strategy, paths, file, order, count)
    found: dict[str, list[Any]] = {reader.name: [] for reader in readers}
    for number in range(rounds + 1):
        for reader in readers:
            one = timed(comm, reader, is_cold)
            # Drop the first round, which loads warm files into the page cache.
            if number:
                found[reader.name].append(one)
    rows = []
    what = f"{file}, {order}, {'cold' if is_cold else 'warm'}"
    for name, times in found.items():
        seconds = [t / done for t, _, done in times]
        mbytes = times[0][2] / comm.size * ROW_BYTES / 1e6
        used = float(np.median([u for _, u, _ in times])) / mbytes
        rows.append(row(what, name, comm.size, ROW_BYTES, seconds, used=used))
        if not comm.rank:
            rate = 1e-3 / np.median(seconds)
            per_second = 1e3 / ROW_BYTES / used
            print(
                f"{what:28} {name:18} {rate:8.1f} thousand rows/s, "
                f"{used * 1e3:6.3f} ms of a processor per MB, "
                f"{per_second:8.1f} thousand rows per processor second",
                flush=True,
            )
    return rows


def cached(strategy: Any, path: Path) -> list[dict[str, Any]]:
    """Time the third epoch of shuffled rows that each rank caches in memory."""
    found, comm = [], strategy.topology.replica_comm
    for own_rows in (False, True):
        kept = hs.Dataset.from_files(path, "x").cache()
        batches = strategy.experimental_distribute_dataset(
            kept.shuffle(seed=1).batch(BATCH), hs.InputOptions(own_rows=own_rows)
        )
        for _ in range(3):
            comm.Barrier()
            began = time.perf_counter()
            for batch in batches:
                del batch
        seconds = comm.allreduce(time.perf_counter() - began, op=_mpi().MAX)
        num_kept = comm.allreduce(len(kept.stage._kept), op=_mpi().MAX)  # type: ignore[attr-defined]
        name = "own rows" if own_rows else "any rows"
        share = num_kept / PACKED_ROWS
        times = [seconds / PACKED_ROWS]
        found.append(
            row("third epoch, cached", name, comm.size, ROW_BYTES, times, kept=share)
        )
        if not comm.rank:
            rate = PACKED_ROWS / seconds / 1e3
            print(
                f"third epoch, cached, {name}: {rate:.1f} thousand rows/s, "
                f"{share:.0%} of the rows in each rank's memory",
                flush=True,
            )
    return found


def train(strategy: Any, path: Path) -> list[dict[str, Any]]:
    """Time steps that compute for 5 ms, and their share of waiting for batches."""
    rows = []
    for order in ("in order", "blocks", "shuffled"):
        for ahead in (0, AHEAD):
            step, share = waiting(strategy, path, order, ahead)
            what = f"step of 5 ms, {order}"
            count = strategy.num_replicas_in_sync
            rows.append(row(what, f"{ahead} ahead", count, 0, [step], share=share))
            if not strategy.replica_id:
                print(f"{what}, {ahead} ahead: {share:.1%} waiting", flush=True)
    return rows


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="For the files.")
@click.option("--rounds", default=5, help="How often all ways take turns.")
@click.option("--cold/--no-cold", default=True, help="Also without the page cache.")
@click.option("--files", default="all", help="Only compare readers of these files.")
@click.option("--json", "json_path", help="File for the figures.")
def main(
    folder: Path | None, rounds: int, cold: bool, files: str, json_path: str | None
) -> None:
    """Measure how fast rows are read."""
    strategy: Any = hs.MultiWorkerMirroredStrategy()
    comm = strategy.topology.replica_comm
    every = ["contiguous", *packings()]
    names = every if files == "all" else files.split(",")
    folder = comm.bcast(folder or Path(tempfile.mkdtemp(prefix="bench-input-")))
    if not comm.rank:
        folder.mkdir(parents=True, exist_ok=True)
        make_files(folder, names)
    comm.Barrier()
    paths = make_files(folder, names)
    rows = []
    for is_cold in (False, True) if cold and os.geteuid() == 0 else (False,):
        for name in names:
            for order in ("in order", "blocks", "shuffled"):
                rows += compare(
                    strategy, paths, name, order, rounds=rounds, is_cold=is_cold
                )
    if files == "all":
        rows += cached(strategy, paths["gzip"])
        rows += train(strategy, paths["contiguous"])
    if json_path and not comm.rank:
        write_json(json_path, _mpi(), rows)


if __name__ == "__main__":
    main()
