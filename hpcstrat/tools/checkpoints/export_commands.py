"""The commands ``hpcstrat ckpt export`` and ``hpcstrat ckpt import``."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click
import numpy as np

from hpcstrat.checkpoint import CheckpointManager
from hpcstrat.checkpoint.file.reader import map_values, open_checkpoint
from hpcstrat.checkpoint.file.schema import checkpoint_name
from hpcstrat.engine.typing import Array
from hpcstrat.engine.values import Adopted
from hpcstrat.errors import HpcstratError
from hpcstrat.tools.checkpoints.reading import checked, known_dtype, one_line
from hpcstrat.tools.terminal import progress
from hpcstrat.variables import Variable

__all__ = ["export", "import_"]

# By format: the endings of its files, and the module that reads and writes it.
_FORMATS = {
    "npz": ((".npz",), "checkpoint.exchange"),
    "h5": ((".h5", ".hdf5"), "checkpoint.exchange"),
    "safetensors": ((".safetensors",), "checkpoint.exchange"),
    "torch": ((".pt", ".pth"), "integrations.torch.torch_files"),
    "keras": ((".keras", ".weights.h5"), "integrations.keras.keras_files"),
}
_FUNCTIONS = {"h5": "hdf5"}
_ROOT = "variables/"
_MOST_NAMES = 10
_Tick = Callable[[int], None]

_model = click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False),
    help="For files of Keras: the model's layers, as a .keras file, or as a .json file "
    "of model.to_json().",
)


def _format(path: str, chosen: str | None, model: str | None) -> str:
    """Return the format of a file, from the option or from the end of its name."""
    # Try longer endings first: .weights.h5 is a format of Keras, not plain HDF5.
    endings = {end: name for name, (ends, _) in _FORMATS.items() for end in ends}
    found = [end for end in sorted(endings, key=len)[::-1] if path.endswith(end)]
    kind = chosen or (endings[found[0]] if found else None)
    ends = _FORMATS[kind][0] if kind else tuple(endings)
    # A Keras file must have one of these endings, because Keras rejects others.
    if kind is None or (kind == "keras" and not path.endswith(ends)):
        raise click.ClickException(
            f"expected a file that ends in {', '.join(ends)}, found {path}; rename it"
        )
    if model and kind != "keras":
        raise click.ClickException(
            f"expected --model for files of Keras only, found a file of {kind}; leave "
            "it out"
        )
    return kind


def _function(verb: str, kind: str) -> Callable[..., Any]:
    """Return the function that reads or writes files of a format."""
    try:
        module = importlib.import_module(f"hpcstrat.{_FORMATS[kind][1]}")
    except (ImportError, HpcstratError) as error:
        raise click.ClickException(one_line(error)) from error
    function: Callable[..., Any] = getattr(
        module, f"{verb}_{_FUNCTIONS.get(kind, kind)}"
    )
    return function


@click.command()
@click.argument("file", type=click.Path())
@click.argument("output", type=click.Path(dir_okay=False))
@click.option(
    "--to",
    type=click.Choice([*_FORMATS]),
    help="Format of OUTPUT; default: from the end of its name.",
)
@click.option(
    "--part",
    help="Write only the values of the object that the CheckpointManager has under "
    "this name, such as model. The names of the values are written without it.",
)
@_model
def export(
    file: str, output: str, to: str | None, part: str | None, model: str | None
) -> None:
    """Write the values of a checkpoint to a file for other programs.

    OUTPUT ends in .npz, .h5 (plain HDF5), .safetensors, .pt (PyTorch), .keras or
    .weights.h5, and must not exist. Files of Keras need --model.
    """
    kind = _format(output, to, model)
    write = _function("write", kind)
    values = _checked_values(file)
    if kind == "keras":
        part = part or "model"
    if part is not None:
        values = _within(values, _prefix(part, values), file)
    # Check this only for a clear message: opening the file with O_EXCL would fail, too.
    if os.path.exists(output):
        raise click.ClickException(
            f"expected a name that is free, found the file {output}; choose another"
        )
    more = {"model": model} if kind == "keras" else {}
    total = sum(value.nbytes for value in values.values())
    try:
        # Use O_EXCL, to never replace a file that another process has just made.
        os.close(os.open(output, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        with (
            progress(total, os.path.basename(output)) as tick,
            _removed_on_error(output),
        ):
            write(output, values, tick, **more)
    except OSError as error:
        raise click.ClickException(f"{output} could not be written: {error}") from error
    except (ValueError, HpcstratError) as error:
        raise click.ClickException(one_line(error)) from error
    click.echo(f"{output}: {len(values)} values")


@contextlib.contextmanager
def _removed_on_error(path: str) -> Iterator[None]:
    """Remove the file if the block raises an error, because it is incomplete."""
    try:
        yield
    except BaseException:
        os.unlink(path)
        raise


def _prefix(part: str, names: Iterable[str]) -> str:
    """Return the prefix that the values of an object have in a checkpoint.

    It is ``variables/PART/`` if the object's values are variables, else ``PART/``.
    """
    prefix = f"{part.strip('/')}/"
    among = f"{_ROOT}{prefix}"
    is_among = any(name.startswith(among) for name in names)
    return among if is_among and not prefix.startswith(_ROOT) else prefix


def _within(values: Mapping[str, Array], prefix: str, path: str) -> dict[str, Array]:
    """Return the values whose names begin with a prefix, by names without it."""
    found = {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
    if not found:
        raise click.ClickException(
            f"expected names that begin with {prefix}, found {_some(values)} in "
            f"{path}; give another"
        )
    return found


def _some(names: Iterable[str]) -> str:
    """Return names as text, shortened if there are many."""
    known = sorted(names)
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return (", ".join(known[:_MOST_NAMES]) or "none") + more


@click.command("import")
@click.argument("source", type=click.Path(exists=True, dir_okay=False))
@click.argument("directory", type=click.Path(file_okay=False))
@click.option(
    "--from",
    "origin",
    type=click.Choice([*_FORMATS]),
    help="Format of SOURCE; default: from the end of its name.",
)
@click.option(
    "--part",
    help="Name, in the program's CheckpointManager, of the object that will restore "
    "the values, such as model.",
)
@click.option(
    "--take",
    help="Import only values whose names begin with this text, and remove it from the "
    "names.",
)
@click.option(
    "--like",
    type=click.Path(),
    help="Checkpoint of the model; the imported values must have its names, shapes and "
    "types.",
)
@click.option("--cast", is_flag=True, help="Convert values to the types in --like.")
@click.option(
    "--partial",
    is_flag=True,
    help="Copy values that SOURCE lacks from --like, and ignore values that --like "
    "lacks.",
)
@click.option(
    "--step",
    type=click.IntRange(0, 10**18 - 1),
    default=0,
    help="Step of the new checkpoint; default: 0.",
)
@_model
def import_(
    *,
    source: str,
    directory: str,
    origin: str | None,
    part: str | None,
    take: str | None,
    like: str | None,
    model: str | None,
    step: int,
    cast: bool,
    partial: bool,
) -> None:
    """Make a checkpoint from a file of another program.

    The values of SOURCE are written to DIRECTORY/ckpt-STEP.h5. SOURCE may have each
    format that hpcstrat ckpt export writes. A program restores the values by
    CheckpointManager.restore(FILE, only=[PART]).
    """
    values = _read(source, _format(source, origin, model), model)
    if take:
        values = _within(values, take, source)
    if (cast or partial) and like is None:
        raise click.ClickException(
            "expected --like with --cast and --partial, found none; give a checkpoint "
            "of the model"
        )
    known = {} if like is None else _checked_values(like)
    values = _named(values, part, known)
    if like is not None:
        values = _fitted(values, known, like, cast=cast, partial=partial)
    path = os.path.join(directory, checkpoint_name(step))
    if os.path.exists(path):
        raise click.ClickException(
            f"expected a name that is free, found the file {path}; choose another step"
        )
    try:
        with CheckpointManager(
            directory, max_to_keep=None, independent=True, **_parts(values)
        ) as manager:
            manager.save(step)
    except (HpcstratError, ValueError, OSError, MemoryError) as error:
        raise click.ClickException(one_line(error)) from error
    click.echo(f"{path}: {len(values)} values")


def _read(source: str, kind: str, model: str | None) -> dict[str, Array]:
    more = {"model": model} if kind == "keras" else {}
    read = _function("read", kind)
    if not stat.S_ISREG(os.stat(source).st_mode):
        raise click.ClickException(
            f"expected a file, found {source}, which is a pipe or a device; copy it to "
            "a file"
        )
    try:
        found: dict[str, Array] = read(source, **more)
        _require_names(found)
    except (ImportError, HpcstratError) as error:
        raise click.ClickException(one_line(error)) from error
    except Exception as error:
        # The libraries of the formats raise errors of any class for a damaged file.
        raise click.ClickException(
            f"expected a file of {kind}, found {source}, which cannot be read: "
            f"{type(error).__name__}: {one_line(error)}; copy the file again"
        ) from error
    return found


def _require_names(names: Iterable[str]) -> None:
    """Raise ValueError for names that cannot be paths of datasets in a checkpoint."""
    known = set(names)
    for name in known:
        parts = name.split("/")
        if {"", ".", ".."} & {*parts} or "\0" in name or not _is_text(name):
            raise ValueError(f"the name {name!r} has an empty part, a dot or no text")
        groups = itertools.accumulate(parts[:-1], "{}/{}".format)
        if inside := known.intersection(groups):
            raise ValueError(f"{min(inside)!r} is a value, and {name!r} is in it")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_values(path: str) -> dict[str, Array]:
    """Verify a checkpoint, and return its values, memory-mapped from the file."""
    for entry in checked(path).entries.values():
        known_dtype(entry.dtype)
    return map_values(open_checkpoint(path))


def _named(
    values: dict[str, Array], part: str | None, known: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the values by the names that they get in the new checkpoint."""
    if part is not None:
        prefix = _prefix(part, known)
        return {f"{prefix}{name}": value for name, value in values.items()}
    strange = [name for name in values if not name.startswith(_ROOT)]
    if not known and strange:
        raise click.ClickException(
            "expected --part, the name of the object that takes the values, such as "
            f"model, or --like, a checkpoint with the same names; found neither, and "
            f"names such as {_some(strange)}"
        )
    return values


def _fitted(
    values: dict[str, Array],
    model: Mapping[str, Array],
    like: str,
    *,
    cast: bool,
    partial: bool,
) -> dict[str, Array]:
    """Return the values with the names, shapes and types of the checkpoint --like."""
    groups = {_group(name) for name in values}
    wanted = {name: value for name, value in model.items() if _group(name) in groups}
    shapes, types = [], []
    for name in sorted(wanted.keys() & values.keys()):
        value, own = values[name], wanted[name]
        if value.shape != own.shape:
            shapes.append(f"{name} {list(value.shape)} for {list(own.shape)}")
        elif value.dtype != own.dtype and not cast:
            types.append(f"{name} {value.dtype} for {own.dtype}")
    faults = [
        ("of other shapes", shapes, "choose other names with --take"),
        ("of other types", types, "give --cast"),
    ]
    if not partial:
        missing = sorted(wanted.keys() - values.keys())
        extra = sorted(values.keys() - wanted.keys())
        faults[:0] = [
            ("missing", missing, "give --partial to keep the model's values"),
            ("that the model does not have", extra, "give --partial to omit them"),
        ]
    found = [f"{words}: {_some(names)} ({do})" for words, names, do in faults if names]
    if found:
        raise click.ClickException(
            f"expected the values of {like}, found values {'; '.join(found)}"
        )
    return {
        name: values.get(name, own).astype(own.dtype, copy=False)
        for name, own in wanted.items()
    }


def _group(name: str) -> str:
    """Return the object's part of a value's name, such as ``variables/model``."""
    first, _, rest = name.partition("/")
    return f"{_ROOT}{rest.partition('/')[0]}" if name.startswith(_ROOT) else first


class _Object:
    """An object with variables by name, which a CheckpointManager can save."""

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the variables by name."""
        return self.variables


def _parts(values: Mapping[str, Array]) -> dict[str, Any]:
    """Return the arguments of a CheckpointManager: Variables that adopt the values."""
    parts: dict[str, Any] = {}
    for name, value in values.items():
        own = np.ascontiguousarray(value).reshape(value.shape)
        own = own.astype(own.dtype.newbyteorder("="), copy=False)
        variable: Any = Variable(Adopted(own, is_equal=True), name=name)
        *groups, last = name.removeprefix(_ROOT).split("/")
        if name.startswith(_ROOT):
            place = parts
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = variable
        else:
            first, _, rest = name.partition("/")
            parts.setdefault(first, _Object()).variables[rest] = variable
    return parts
