"""The command ``hpcstrat ckpt bench``, which measures a file system."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from hpcstrat.checkpoint.bench import (
    STRIPE_BYTES,
    MeasuredWay,
    Writers,
    compare,
    run_in_threads,
    scratch,
)
from hpcstrat.checkpoint.disk import file_system_name, is_local
from hpcstrat.checkpoint.file.extents import choose_block_bytes
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import CheckpointError, TopologyError
from hpcstrat.tools.bench.run_file import write_json
from hpcstrat.tools.terminal import new_console, new_table, progress

__all__ = ["advise", "bench", "parse_size"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b)", re.IGNORECASE)
_LETTERS = "kmgt"
# A ratio of medians below _SAME is noise; a ratio above _MUCH is reported.
_SAME = 1.1
_MUCH = 1.5
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class _BenchOptions:
    """The options of the command line."""

    directory: str
    folder: str
    size: str
    rounds: int
    output: str | None


@click.command()
@click.argument("directory", type=click.Path())
@click.option(
    "--size",
    default="256MiB",
    show_default=True,
    help="Size of the data that all ranks write together.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Measurements of each way of writing.",
)
@click.option(
    "--json", "output", type=click.Path(), help="Also write all times to this file."
)
def bench(directory: str, size: str, rounds: int, output: str | None) -> None:
    """Find the fastest way of writing checkpoints in DIRECTORY.

    Under mpirun or srun, all ranks write, as they do in a program. Without a launcher,
    threads of this process represent ranks. The test files are removed, even after an
    interrupt.
    """
    launch = launch_from_environment()
    # Call `scratch` before MPI starts, because it starts a process, unsafe after that.
    guard = scratch(directory) if launch.rank == 0 else contextlib.nullcontext("")
    try:
        with guard as folder:
            wish = _BenchOptions(directory, folder, size, rounds, output)
            if launch.launcher:
                _bench_ranks(wish, launch.launcher)
            else:
                _bench_threads(wish)
    except TopologyError as error:
        raise click.ClickException(str(error)) from error
    except CheckpointError as error:
        # All ranks raise the same error: print it once.
        if launch.rank == 0:
            click.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from error


def _bench_ranks(wish: _BenchOptions, launcher: str) -> None:
    # Let an interrupt kill the rank, so that the launcher ends the job: with a Python
    # exception, the other ranks would wait for this rank.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    world = Topology.world()
    _bench(world, wish, f"{world.size} ranks ({launcher})")


def _bench_threads(wish: _BenchOptions) -> None:
    # Use at least two threads, to measure several writers of one file.
    count = max(2, min(_MOST_THREADS, len(os.sched_getaffinity(0))))
    words = f"{count} threads that stand for ranks, which mpirun or srun would start"
    run_in_threads(count, lambda group: _bench(group, wish, words))


def _bench(group: Writers, wish: _BenchOptions, writers: str) -> None:
    """Measure all ways of writing, and print the results on rank 0.

    If there is an error, all ranks raise it.
    """
    # Parse the size here, where all ranks raise the same error.
    nbytes = parse_size(wish.size)
    problem = "" if group.rank or not wish.output else _unwritable(wish.output)
    # Check the output file now, and not after minutes of writing.
    if problem := group.allgather(problem)[0]:
        raise CheckpointError(problem)
    show = progress if group.rank == 0 else _no_progress
    usual = choose_block_bytes(nbytes, group.size)
    num_ways = 4 * len({STRIPE_BYTES, usual})
    # Count the bytes twice, because the files are written and then read.
    with show(2 * num_ways * wish.rounds * nbytes, "writing and reading") as tick:
        results = compare(group, wish.folder, nbytes, wish.rounds, tick)
    if group.rank:
        return
    kind, auto = file_system_name(wish.directory), is_local(wish.directory)
    click.echo(f"{wish.directory}: {kind}")
    click.echo(f"{nbytes:,} bytes, median of {wish.rounds}, written by {writers}")
    _show(results)
    lines = advise(results, auto, kind, wish.directory)
    for line in lines:
        click.echo(line)
    if wish.output is not None:
        _save(wish.output, _report(wish, kind, group.size, results, lines))


def _unwritable(output: str) -> str:
    """Return why a file cannot be written; empty if it can be written."""
    folder = os.path.dirname(os.path.abspath(output))
    place = output if os.path.exists(output) else folder
    if os.path.isdir(output) or not os.access(place, os.W_OK):
        return f"expected a file that can be written, found {output}; choose another"
    return ""


@contextlib.contextmanager
def _no_progress(*_: object) -> Any:
    yield lambda _: None


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``1.5 GiB`` or ``100MB``, rounded up to MiB.

    The result is at least one MiB. Raises CheckpointError if the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise CheckpointError(
            f"expected a size such as 256MiB or 2GB, found {text!r}; give a number "
            "above 0 and its unit"
        )
    # "256M" means 256 MiB, as in dd; "256MB" is decimal.
    base = 1000 if match[2] and not match[3] and "b" in text.lower() else 1024
    power = _LETTERS.index(match[2].lower()) + 1 if match[2] else 0
    nbytes = int(float(match[1]) * base**power)
    # Round up to whole stripes, because direct writes need aligned lengths.
    return max(-(-nbytes // STRIPE_BYTES), 1) * STRIPE_BYTES


def _show(results: Sequence[MeasuredWay]) -> None:
    table = new_table("layout", "part", "write GB/s", "read GB/s")
    for found in results:
        way = found.way
        name = "one file" if way.shared else "a file per writer"
        path = "direct" if way.direct else "page cache"
        path = "direct (refused: page cache)" if found.refused else path
        rates = found.write_bytes_per_second, found.read_bytes_per_second
        words = [f"{rate / 1e9:.3g}" for rate in rates]
        table.add_row(f"{name}, {path}", f"{way.piece_bytes >> 20} MiB", *words)
    new_console().print(table)


def advise(
    results: Sequence[MeasuredWay], auto: bool, kind: str, directory: str
) -> list[str]:
    """Return lines of advice; the last line names the setting to use.

    ``auto`` is true if the setting ``auto`` means direct writes in this folder.
    ``kind`` is the type of the file system, such as ``Lustre``.
    """
    # Two part sizes were measured: a stripe, and the part size of real checkpoints,
    # which is at least a stripe.
    usual = max(found.way.piece_bytes for found in results)
    lines = []
    shared, single = (
        max(f.write_bytes_per_second for f in results if f.way.shared is is_shared)
        for is_shared in (True, False)
    )
    if single > _MUCH * shared:
        lines.append(
            f"a file per writer is written {single / shared:.1f} times as fast as one "
            f"file, which is what hpcstrat writes{_remedy(kind, directory)}"
        )
    ways = {
        found.way.direct: found
        for found in results
        if found.way.shared and found.way.piece_bytes == usual
    }
    return [*lines, _setting(ways[True], ways[False], auto)]


def _remedy(kind: str, directory: str) -> str:
    if kind == "Lustre":
        # With stripes of 16 MiB, the largest block is one request to one server.
        return f"; spread the folder: lfs setstripe -c -1 -S 16M {directory}"
    if kind == "NFS":
        return "; a parallel file system or a local disk writes one file faster"
    return ""


def _setting(direct: MeasuredWay, cached: MeasuredWay, auto: bool) -> str:
    """Return the advice on ``direct_io``, for the part size of real checkpoints."""
    chosen = "on" if auto else "off"
    if direct.refused:
        return (
            "direct_io: this file system refuses direct writes; nothing to set: every "
            "value means the page cache"
        )
    ratio = direct.write_bytes_per_second / cached.write_bytes_per_second
    best = "on" if ratio > 1 else "off"
    times = max(ratio, 1 / ratio)
    fast, slow = (direct, cached) if best == "on" else (cached, direct)
    # If the times of the two ways overlap, their medians do not differ clearly.
    if times < _SAME or max(fast.write_seconds) > min(slow.write_seconds):
        return (
            'direct_io: "on" and "off" do not differ clearly; nothing to set: "auto" '
            f'picks "{chosen}" here'
        )
    if best == chosen:
        return (
            f'direct_io: "{best}" writes {times:.1f} times as fast; nothing to set: '
            '"auto" picks it here'
        )
    return (
        f'direct_io: "{best}" writes {times:.1f} times as fast as "{chosen}", which '
        f'"auto" picks here; set HPCSTRAT_DIRECT_IO={best}'
    )


def _report(
    wish: _BenchOptions,
    kind: str,
    num_writers: int,
    results: Sequence[MeasuredWay],
    lines: Sequence[str],
) -> dict[str, Any]:
    rows = [
        {
            **asdict(found.way),
            "refused": found.refused,
            "write_seconds": found.write_seconds,
            "read_seconds": found.read_seconds,
            "write_bytes_per_second": found.write_bytes_per_second,
            "read_bytes_per_second": found.read_bytes_per_second,
        }
        for found in results
    ]
    # Never change the names in the JSON file, because scripts rely on them.
    return {
        "directory": os.path.abspath(wish.directory),
        "file_system": kind,
        "launcher": launch_from_environment().launcher,
        "num_writers": num_writers,
        "bytes": results[0].nbytes,
        "auto_is_direct": is_local(wish.directory),
        "layouts": rows,
        "advice": list(lines),
    }


def _save(output: str, report: dict[str, Any]) -> None:
    try:
        write_json(report, output)
    except OSError as error:
        raise CheckpointError(f"{output} could not be written: {error}") from error
