"""The command ``hpcstrat ckpt``, whose subcommands read checkpoints without MPI."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from hpcstrat.checkpoint.file.reader import NoCheckpointError, read_values
from hpcstrat.checkpoint.file.schema import (
    Entry,
    Header,
    list_checkpoints,
    section_of,
)
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError, CorruptCheckpointError
from hpcstrat.tools.checkpoints.bench_command import bench
from hpcstrat.tools.checkpoints.export_commands import export, import_
from hpcstrat.tools.checkpoints.reading import (
    checked,
    explained,
    header_of,
    known_dtype,
    one_line,
    read,
    unreadable,
    verify_file,
)
from hpcstrat.tools.terminal import (
    UncutGroup,
    add_row,
    new_console,
    new_table,
    progress,
)

__all__ = ["ckpt", "differences"]

_DAMAGED = 1
# The exit status for a difference, as in diff(1).
_DIFFERENT = 1


@click.group(cls=UncutGroup)
def ckpt() -> None:
    """List, check, compare and convert checkpoints."""


ckpt.add_command(bench)
ckpt.add_command(export)
ckpt.add_command(import_)

_file = click.argument("file", type=click.Path())


@ckpt.command()
@click.argument("directory", type=click.Path())
def ls(directory: str) -> None:
    """List the checkpoints in DIRECTORY.

    The exit status is 1 if a checkpoint is damaged.
    """
    table = new_table("file", "step", "replicas", "variables", "bytes")
    problems = []
    for path in _listed(directory):
        name = os.path.basename(path)
        try:
            # Use lstat, because the target of a symbolic link may be missing.
            size = f"{os.lstat(path).st_size:,}"
            header = read(path)
        except FileNotFoundError:
            # Skip a file that a running job has removed since the folder was listed.
            continue
        except OSError as error:
            # For example, the user may list the folder, but may not read its files.
            raise click.ClickException(unreadable(path, error)) from error
        except CheckpointError as error:
            add_row(table, name, "damaged", "", "", size)
            problems.append(f"{name}: {one_line(error)}")
            continue
        words = (header.step, header.num_replicas, len(header.entries))
        add_row(table, name, *words, size)
    new_console().print(table)
    for problem in problems:
        click.echo(problem)
    raise SystemExit(_DAMAGED if problems else 0)


def _listed(directory: str) -> list[str]:
    """Return the paths of the checkpoints in a folder, which must exist."""
    if not os.path.isdir(directory):
        found = "a file" if os.path.exists(directory) else "nothing"
        raise click.ClickException(
            f"expected a folder, found {found} at {directory}; give the folder of "
            "checkpoints"
        )
    try:
        return list_checkpoints(directory)
    except OSError as error:
        raise click.ClickException(unreadable(directory, error)) from error


@ckpt.command()
@_file
def show(file: str) -> None:
    """Show the step, the metrics and the variables of the checkpoint FILE."""
    header = header_of(file)
    console = new_console()
    console.print(f"step {header.step}, saved by {header.num_replicas} replicas")
    for name, value in header.metrics.items():
        console.print(f"metric {name}: {value}")
    table = new_table("name", "dtype", "shape", "synchronization", "aggregation")
    for entry in header.entries.values():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        kinds = entry.synchronization, entry.aggregation
        add_row(table, entry.path, entry.dtype, shape, *kinds)
    console.print(table)
    for name, state in header.iterators.items():
        section = section_of(state)
        # Omit arrays, such as the state words of random generators.
        about = {k: v for k, v in state.items() if not isinstance(v, np.ndarray)}
        console.print(f"{section}/{name}: {about}")
    for name in header.python:
        console.print(f"python/{name}")


@ckpt.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path())
def verify(paths: tuple[str, ...]) -> None:
    """Check every byte of checkpoints.

    PATHS are files or folders. The exit status is 1 if a checkpoint is damaged, cannot
    be read, or has no hashes to check it by, or if there are no checkpoints.
    """
    files = [
        file
        for path in paths
        for file in (_listed(path) if os.path.isdir(path) else [path])
    ]
    # Fail if there are no checkpoints, because the user may have mistyped the folder.
    wrong = not files
    for file in files:
        good, words = _verdict(file)
        # Continue, because the user needs to know which files are good.
        wrong |= not good
        click.echo(f"{file}: {words}")
    if not files:
        click.echo("no checkpoints found")
    raise SystemExit(_DAMAGED if wrong else 0)


def _verdict(file: str) -> tuple[bool, str]:
    """Verify a file; return whether it is good, and a message about it."""
    try:
        count = verify_file(file)
    except NoCheckpointError as error:
        return False, f"no checkpoint: {one_line(error)}"
    except CorruptCheckpointError as error:
        return False, f"DAMAGED: {one_line(error)}"
    except CheckpointError as error:
        # Do not report damage: the file may have a newer format, or be unreadable now.
        return False, f"not verified: {one_line(error)}"
    except OSError as error:
        return False, f"not verified: {unreadable(file, error)}"
    if count is None:
        return False, "not verified: format version 1 has no hashes"
    return True, f"good, {count:,} bytes checked"


@ckpt.command()
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
def diff(first: str, second: str) -> None:
    """Show how two checkpoints differ.

    The exit status is 1 if they differ in more than the step.
    """
    steps, lines = differences(first, second, _by_value)
    click.echo(f"steps {steps[0]} and {steps[1]}")
    if lines:
        table = new_table("name", "difference")
        for name, text in lines:
            add_row(table, name, text)
        new_console().print(table)
    else:
        click.echo("no difference")
    raise SystemExit(_DIFFERENT if lines else 0)


def differences(
    first: str, second: str, describe: Callable[[Array, Array], str]
) -> tuple[tuple[int, int], list[tuple[str, str]]]:
    """Return the steps of two checkpoints, and name and difference of unequal values.

    ``describe`` returns a text on how two arrays of the same shape and dtype differ, or
    an empty text if they are equal. Raises ClickException if a file is damaged or
    cannot be read.
    """
    # Verify both files first: a flipped bit would look like a result of training.
    headers = checked(first), checked(second)
    lines = []
    names = sorted(set(headers[0].entries) | set(headers[1].entries))
    # For the progress bar: the bytes read of each value, from one file or from both.
    sizes = {name: sum(map(_nbytes, _entries(name, headers))) for name in names}
    with progress(sum(sizes.values()), "comparing") as tick:
        for name in names:
            text = _difference(name, headers, (first, second), describe)
            if text:
                lines.append((name, text))
            tick(sizes[name])
    for section in ("iterators", "python"):
        states = [getattr(header, section) for header in headers]
        for name in sorted(set(states[0]) | set(states[1])):
            one, other = states[0].get(name), states[1].get(name)
            if not _same_state(one, other):
                lines.append((f"{section}/{name}", "another state"))
    return (headers[0].step, headers[1].step), lines


def _entries(name: str, headers: tuple[Header, Header]) -> list[Entry]:
    found = (header.entries.get(name) for header in headers)
    return [entry for entry in found if entry is not None]


def _nbytes(entry: Entry) -> int:
    return math.prod(entry.shape) * known_dtype(entry.dtype).itemsize


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            np.array_equal(one[key], other[key]) for key in one
        )
    return bool(one == other)


def _difference(
    name: str,
    headers: tuple[Header, Header],
    paths: tuple[str, str],
    describe: Callable[[Array, Array], str],
) -> str:
    """Return a text on how a value differs in two checkpoints; empty if it does not."""
    entries = [header.entries.get(name) for header in headers]
    if entries[0] is None or entries[1] is None:
        return f"only in the {'second' if entries[0] is None else 'first'}"
    kinds = [(entry.dtype, entry.shape) for entry in entries if entry is not None]
    if kinds[0] != kinds[1]:
        return " and ".join(f"{dtype}{list(shape)}" for dtype, shape in kinds)
    one, other = (_value(path, name, kinds[0][0]) for path in paths)
    return describe(one, other)


def _by_value(one: Array, other: Array) -> str:
    """Return a text on how two arrays differ; NaN counts as equal to NaN."""
    # Suppress warnings: in bfloat16, a comparison with NaN warns.
    with np.errstate(invalid="ignore"):
        unequal = np.asarray(one != other)
        if one.dtype.kind not in "iub":
            unequal &= ~(np.isnan(one) & np.isnan(other))
    count = int(unequal.sum())
    if not count:
        return ""
    index = tuple(int(i) for i in np.argwhere(unequal)[0]) if unequal.ndim else ()
    values = f"first at {list(index)}: {one[index]} and {other[index]}"
    # Print no difference of integers, because it may not fit into their type.
    if one.dtype.kind in "iub":
        return f"{count:,} of {one.size:,} elements, {values}"
    # Use float64: in bfloat16 or float16 the difference may round or overflow.
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        largest = np.nanmax(np.abs(one.astype(wide) - other.astype(wide)))
    return f"{count:,} of {one.size:,} elements by at most {largest:.3g}, {values}"


def _value(path: str, name: str, dtype: str) -> Array:
    with explained(path):
        return read_values(path, {name: known_dtype(dtype)})[name]
