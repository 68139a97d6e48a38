"""Functions that read checkpoints for the commands, and explain errors to users."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from hpcstrat.checkpoint.file.commit_record import Blocks
from hpcstrat.checkpoint.file.image import Image
from hpcstrat.checkpoint.file.reader import open_checkpoint, read_header
from hpcstrat.checkpoint.file.schema import Header, named_dtype
from hpcstrat.errors import CheckpointError
from hpcstrat.tools.terminal import progress

__all__ = [
    "checked",
    "explained",
    "header_of",
    "known_dtype",
    "one_line",
    "read",
    "unreadable",
    "verify_file",
]


def one_line(error: Exception) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())


def unreadable(path: str, error: OSError) -> str:
    """Return a message about a file that cannot be read."""
    return (
        f"expected a readable checkpoint, found {path}: {error.strerror}; check the "
        "path and its permissions"
    )


def read(path: str) -> Header:
    """Return a checkpoint's header; raise FileNotFoundError or CheckpointError."""
    _require_file(path)
    return read_header(path)


def _require_file(path: str) -> None:
    """Raise FileNotFoundError or CheckpointError if a path is not a readable file."""
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISREG(kind):
            # Open the file: without this check, a file that the user may not read would
            # be reported as damaged.
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            return
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    found = "a folder" if stat.S_ISDIR(kind) else "something else"
    raise CheckpointError(
        f"expected a file, found {found} at {path}; give one checkpoint"
    )


def verify_file(path: str) -> int | None:
    """Verify a file; return the number of verified bytes, or None if it has no hash."""
    _require_file(path)
    found = open_checkpoint(path)
    if found.vouched is None:
        return None
    plan, count = found.vouched.plan, 0
    # Use one buffer: the file may be larger than a login node's memory.
    slot = Image(1, plan.block_bytes).slot(0)
    with (
        Blocks(path, found.vouched, direct=False) as blocks,
        progress(plan.data_end - plan.data_start, os.path.basename(path)) as tick,
    ):
        for block in range(plan.num_blocks):
            nbytes = blocks.read(block, slot).nbytes
            count += nbytes
            tick(nbytes)
    return count


def header_of(path: str) -> Header:
    """Return the header of a file, without reading its data."""
    with explained(path):
        return read(path)


def checked(path: str) -> Header:
    """Return the header of a file, after verifying all bytes of the file."""
    header = header_of(path)
    # Verify the whole file, because values are later read without a check of hashes.
    with explained(path):
        if verify_file(path) is None:
            text = "not verified: format version 1 has no hashes"
            click.echo(f"{path}: {text}", err=True)
    return header


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """End the command with a one-line message if reading a file fails in the block."""
    try:
        yield
    except CheckpointError as error:
        raise click.ClickException(one_line(error)) from error
    except OSError as error:
        raise click.ClickException(unreadable(path, error)) from error


def known_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype by its name; bfloat16 needs ml_dtypes, which may be missing."""
    try:
        return named_dtype(name)
    except (ImportError, TypeError) as error:
        raise click.ClickException(
            f"expected a type that is known here, found {name}: {one_line(error)}; "
            "install what is missing"
        ) from error
