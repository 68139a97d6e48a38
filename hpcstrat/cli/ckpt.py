"""The commands that look into checkpoints; they need no MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hpcstrat.checkpoint.blocks import Blocks
from hpcstrat.checkpoint.export import export_values
from hpcstrat.checkpoint.image import Image
from hpcstrat.checkpoint.layout import Header, list_checkpoints, named_dtype
from hpcstrat.checkpoint.reader import open_checkpoint, read_header, read_values
from hpcstrat.errors import CheckpointError, CorruptCheckpointError
from hpcstrat.typing import Array

__all__ = ["ckpt"]

_DAMAGED = 1
_DIFFERENT = 1


@click.group()
def ckpt() -> None:
    """Look into checkpoints."""


_file = click.argument("file", type=click.Path(exists=True, dir_okay=False))


@ckpt.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
def ls(directory: str) -> None:
    """List the checkpoints in DIRECTORY; exit status 1 if one is damaged."""
    table = Table("file", "step", "replicas", "variables", "bytes")
    damaged = False
    for path in list_checkpoints(directory):
        name, size = os.path.basename(path), f"{os.path.getsize(path):,}"
        try:
            header = read_header(path)
        except CheckpointError as error:
            table.add_row(name, str(error), "", "", size)
            damaged = True
            continue
        words = (header.step, header.num_replicas, len(header.entries))
        table.add_row(name, *map(str, words), size)
    Console().print(table)
    raise SystemExit(_DAMAGED if damaged else 0)


@ckpt.command()
@_file
def show(file: str) -> None:
    """Show what the checkpoint FILE holds."""
    header = _header(file)
    console = Console()
    console.print(f"step {header.step}, saved by {header.num_replicas} replicas")
    table = Table("name", "dtype", "shape", "synchronization", "aggregation")
    for entry in header.entries.values():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        kinds = entry.synchronization, entry.aggregation
        table.add_row(entry.path, entry.dtype, shape, *kinds)
    console.print(table)
    for name, state in header.iterators.items():
        console.print(f"iterators/{name}: {state}")
    for name in header.python:
        console.print(f"python/{name}")


@ckpt.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True))
def verify(paths: tuple[str, ...]) -> None:
    """Check every byte of the checkpoints PATHS, which are files or folders.

    The exit status is 1 if one is damaged, or has no hashes to check it by.
    """
    damaged = False
    files = [
        file
        for path in paths
        for file in (list_checkpoints(path) if os.path.isdir(path) else [path])
    ]
    for file in files:
        try:
            count = _verify(file)
        except CheckpointError as error:
            damaged = True
            click.echo(f"{file}: DAMAGED: {error}")
            continue
        if count is None:
            damaged = True
            click.echo(f"{file}: not verified: format version 1 has no hashes")
        else:
            click.echo(f"{file}: good, {count:,} bytes checked")
    if not files:
        click.echo("no checkpoints found")
    raise SystemExit(_DAMAGED if damaged or not files else 0)


def _verify(path: str) -> int | None:
    """Return how many bytes of values were checked; None without hashes."""
    found = open_checkpoint(path)
    if found.vouched is None:
        return None
    plan, count = found.vouched.plan, 0
    slot = Image(1, plan.block_bytes).slot(0)
    with Blocks(path, found.vouched, direct=False) as blocks:
        for block in _progress(range(plan.num_blocks), os.path.basename(path)):
            count += blocks.read(block, slot).nbytes
    return count


def _progress(things: Any, title: str) -> Iterator[Any]:
    """Show how far a long work is, where people look on."""
    console = Console(stderr=True)
    yield from track(things, title, console=console, disable=not console.is_terminal)


@ckpt.command()
@click.argument("first", type=click.Path(exists=True, dir_okay=False))
@click.argument("second", type=click.Path(exists=True, dir_okay=False))
def diff(first: str, second: str) -> None:
    """Say how two checkpoints differ; exit status 1 if they do, apart from the step."""
    headers = _checked(first), _checked(second)
    table = Table("name", "difference")
    for name in sorted(set(headers[0].entries) | set(headers[1].entries)):
        text = _difference(name, headers, (first, second))
        if text:
            table.add_row(name, text)
    for section in ("iterators", "python"):
        states = [getattr(header, section) for header in headers]
        for name in sorted(set(states[0]) | set(states[1])):
            one, other = states[0].get(name), states[1].get(name)
            if not _same_state(one, other):
                table.add_row(f"{section}/{name}", "another state")
    steps = [header.step for header in headers]
    click.echo(f"steps {steps[0]} and {steps[1]}")
    if table.row_count:
        Console().print(table)
    else:
        click.echo("no difference")
    raise SystemExit(_DIFFERENT if table.row_count else 0)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            np.array_equal(one[key], other[key]) for key in one
        )
    return bool(one == other)


def _difference(
    name: str, headers: tuple[Header, Header], paths: tuple[str, str]
) -> str:
    """Return how a value differs; empty where it does not."""
    entries = [header.entries.get(name) for header in headers]
    if entries[0] is None or entries[1] is None:
        return f"only in the {'second' if entries[0] is None else 'first'}"
    kinds = [(entry.dtype, entry.shape) for entry in entries if entry is not None]
    if kinds[0] != kinds[1]:
        return " and ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
    one, other = (_value(path, name, kinds[0][0]) for path in paths)
    unequal = np.asarray(one != other)
    if one.dtype.kind not in "iub":
        unequal &= ~(np.isnan(one) & np.isnan(other))
    count = int(unequal.sum())
    if not count:
        return ""
    index = tuple(int(i) for i in np.argwhere(unequal)[0]) if unequal.ndim else ()
    values = f"first at {list(index)}: {one[index]} and {other[index]}"
    if one.dtype.kind in "iub":
        return f"{count:,} of {one.size:,} elements, {values}"
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.nanmax(np.abs(one.astype(wide) - other.astype(wide)))
    return f"{count:,} of {one.size:,} elements by at most {largest:.3g}, {values}"


@ckpt.command()
@_file
@click.argument("output", type=click.Path(dir_okay=False))
def export(file: str, output: str) -> None:
    """Write the values of FILE to OUTPUT, .npz or plain .h5, which must not exist."""
    header = _checked(file)
    if os.path.splitext(output)[1] not in (".npz", ".h5", ".hdf5"):
        raise click.ClickException(
            f"expected an output that ends in .npz, .h5 or .hdf5, found {output}; "
            "rename it"
        )
    if os.path.exists(output):
        raise click.ClickException(
            f"expected a name that is free, found the file {output}; choose another"
        )
    names = _progress(sorted(header.entries), os.path.basename(file))
    values = ((n, _value(file, n, header.entries[n].dtype)) for n in names)
    try:
        export_values(output, values)
    except OSError as error:
        raise click.ClickException(f"{output} could not be written: {error}") from error
    click.echo(f"{output}: {len(header.entries)} values")


def _header(path: str) -> Header:
    try:
        return read_header(path)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error


def _checked(path: str) -> Header:
    """Return what a file holds, after all its bytes were checked."""
    header = _header(path)
    try:
        checked = _verify(path)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    if checked is None:
        click.echo(f"{path}: not verified: format version 1 has no hashes", err=True)
    return header


def _value(path: str, name: str, dtype: str) -> Array:
    try:
        return read_values(path, {name: named_dtype(dtype)})[name]
    except CorruptCheckpointError as error:
        raise click.ClickException(str(error)) from error
