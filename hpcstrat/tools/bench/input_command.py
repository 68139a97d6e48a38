"""The command ``hpcstrat bench input``: measures how fast a user's files are read.

It reads them in each order, and advises on how to read them faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from hpcstrat.data.dataset import Dataset
from hpcstrat.data.files.rows import FileRows, files_of
from hpcstrat.engine.tree import flatten
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["input_command"]

_ORDERS = ("in order", "by blocks", "shuffled")
_BLOCK_ROWS = 16
_AHEAD = 4
_RAW_BYTES = 1 << 20


@dataclass(frozen=True)
class _Reading:
    """The rows, bytes and times of one measurement, which read rows in one order.

    ``ahead`` is the number of batches read ahead. ``processor_seconds`` is the
    processor time of all threads of this process.
    """

    order: str
    ahead: int
    num_rows: int
    nbytes: int
    seconds: float
    processor_seconds: float

    @property
    def rows_per_second(self) -> float:
        """Rows read per second of wall time."""
        return self.num_rows / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the batches that were made, per second of wall time."""
        return self.nbytes / self.seconds

    @property
    def processor_ms_per_mb(self) -> float:
        """Milliseconds of processor time per 10**6 bytes of batches."""
        return self.processor_seconds * 1e9 / max(self.nbytes, 1)


def _dataset(rows: Dataset, order: str, ahead: int, batch_size: int) -> Dataset:
    if order == "by blocks":
        rows = rows.shuffle(blocks=_BLOCK_ROWS)
    elif order == "shuffled":
        rows = rows.shuffle()
    return rows.batch(batch_size).repeat().prefetch(ahead)


def _timed(batches: Iterator[Any], seconds: float, order: str, ahead: int) -> _Reading:
    num_rows = nbytes = 0
    began, used = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < seconds or not num_rows:
        arrays = flatten(next(batches))[0]
        num_rows += len(arrays[0])
        nbytes += sum(array.nbytes for array in arrays)
    used = time.process_time() - used
    return _Reading(order, ahead, num_rows, nbytes, max(passed, 1e-9), used)


def _measure_reading(
    paths: Sequence[str],
    *,
    columns: Sequence[str] | None,
    batch_size: int,
    seconds: float,
    is_cold: bool,
) -> tuple[FileRows, float, list[_Reading]]:
    """Measure how fast batches are read in each of `_ORDERS`, also with reading ahead.

    Each measurement takes about ``seconds``. Returns the rows, the bytes per second of
    plain reads of the same files, and the measurements. If ``is_cold``, the kernel
    drops the files from its page cache before each measurement.
    """
    made = Dataset.from_files(paths, columns)
    rows = made.stage
    assert isinstance(rows, FileRows)
    if not rows.cardinality:
        raise ValueError(f"expected rows in {paths[0]}, found none")
    found = []
    raw = _raw(rows.paths, seconds, is_cold=is_cold)
    for order in _ORDERS:
        for ahead in (0, _AHEAD):
            if is_cold:
                _forget(rows.paths)
            # Make a new data set for each measurement, because a used one may still
            # have chunks that it decompressed.
            fresh = Dataset.from_files(paths, columns)
            batches = iter(_dataset(fresh, order, ahead, batch_size))
            found.append(_timed(batches, seconds, order, ahead))
            del batches
    return rows, raw, found


def _forget(paths: Sequence[str]) -> None:
    """Ask the kernel to drop files from its page cache."""
    for path in _plain_files(paths):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _plain_files(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for folder, _, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in names)


def _raw(paths: Sequence[str], seconds: float, *, is_cold: bool) -> float:
    """Return the bytes per second of plain reads of the files, one after the other."""
    if is_cold:
        _forget(paths)
    buffer = np.empty(_RAW_BYTES, np.uint8)
    nbytes, began = 0, time.perf_counter()
    for path in _plain_files(paths):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer.data):
                nbytes += count
                if time.perf_counter() - began > seconds:
                    return nbytes / (time.perf_counter() - began)
    return nbytes / max(time.perf_counter() - began, 1e-9)


def _advice(rows: FileRows, found: Sequence[_Reading], batch_size: int) -> list[str]:
    """Return sentences that advise how to read the files faster."""
    said = []
    columns = rows.columns()
    packed = [name for name, column in columns.items() if "by zlib" in column.how]
    if packed:
        said.append(
            f"{', '.join(packed)}: pip install deflate: libdeflate decompresses "
            "chunks up to four times as fast as zlib"
        )
    through = [name for name, column in columns.items() if "h5py" in column.how]
    if through:
        said.append(
            f"{', '.join(through)}: h5py reads one thread at a time; several "
            "threads can read them if they are contiguous, compressed by gzip, or, "
            "after pip install numcodecs, compressed by zstd, lz4 or blosc"
        )
    rate = {(r.order, r.ahead): r.rows_per_second for r in found}
    whole, blocks, mixed = (rate[order, 0] for order in _ORDERS)
    if blocks > 1.5 * mixed:
        said.append(
            f"shuffle(blocks={_BLOCK_ROWS}) reads {blocks / mixed:.1f} times as fast "
            "as shuffle(); see the guide, because it shuffles less"
        )
    if whole > 3 * blocks and any("chunks of" in c.how for c in columns.values()):
        said.append(
            "chunks hold more rows than a block: shuffle(blocks=ROWS_OF_A_CHUNK) "
            "decompresses each once"
        )
    best = max(rate[order, _AHEAD] / rate[order, 0] for order in _ORDERS)
    if best > 1.2:
        said.append(
            f"prefetch({_AHEAD}) reads up to {best:.1f} times as fast, and while the "
            "program computes"
        )
    if batch_size < 64 and whole > 0:
        said.append("larger batches need fewer calls; try --batch-size 256")
    return said


def _rate(reading: _Reading) -> list[str]:
    ahead = f"{reading.ahead} batches" if reading.ahead else "no"
    return [
        reading.order,
        ahead,
        f"{reading.rows_per_second:,.0f}",
        f"{reading.bytes_per_second / 1e6:,.0f}",
        f"{reading.processor_ms_per_mb:.2f}",
    ]


@click.command("input", context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--columns",
    metavar="NAMES",
    help="Names or patterns of columns, separated by commas; default: all columns.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=256,
    help="Rows that are read at once.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01),
    default=3.0,
    help="Duration of each measurement.",
)
@click.option(
    "--cold",
    is_flag=True,
    help="Drop the files from the kernel's page cache before each measurement.",
)
def input_command(
    files: tuple[str, ...],
    columns: str | None,
    batch_size: int,
    seconds: float,
    cold: bool,
) -> None:
    """Measure how fast files are read in each order, and advise on how to read faster.

    \b
        hpcstrat bench input 'era5/*.nc' --columns t2m,u10
    """
    wanted = None if columns is None else [name.strip() for name in columns.split(",")]
    try:
        rows, raw, found = _measure_reading(
            files_of(files),
            columns=wanted,
            batch_size=batch_size,
            seconds=seconds,
            is_cold=cold,
        )
    except (ImportError, OSError, ValueError) as error:
        click.echo(f"hpcstrat bench input: {error}", err=True)
        raise SystemExit(2) from error
    console = new_console()
    console.print(f"{rows.describe()}; plain reads: {raw / 1e6:,.0f} MB/s")
    for name, column in rows.columns().items():
        console.print(f"  {name or 'array'}: {column.how}")
    table = new_table("order", "read ahead", "rows/s", "MB/s", "processor ms/MB")
    for reading in found:
        add_row(table, *_rate(reading))
    console.print(table)
    said = _advice(rows, found, batch_size)
    for sentence in said or ["found no way to read faster"]:
        console.print(f"- {sentence}")
