"""Programs of tf.data, built and run on `hpcstrat.Dataset`.

A program is a list of steps, ``[method, *arguments, {keywords}]``; the first step makes
the dataset. A function is named by its computation, such as ``x*10``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.data import SHARD_HINT, ArraySpec, DatasetOptions
from hpcstrat.data.batches import pieces_of
from hpcstrat.engine.tree import flatten, unflatten

__all__ = [
    "NotBuilt",
    "build",
    "distributed_program",
    "outcome",
    "plain",
    "spec_text",
    "write_files",
]

Dataset = hs.Dataset
_MOST_ELEMENTS = 40


class NotBuilt(Exception):
    """An error: a program uses a method or a function that the replay does not know."""


def _raise_at_3(x: Any) -> Any:
    if np.any(x == 3):
        raise ValueError("the element is 3")
    return x


def _arithmetic(text: str) -> Callable[..., Any] | None:
    """Return the function of a name such as ``x%3!=0``, ``x*10`` or ``(a,b)->a+b``."""
    names, arrow, body = text.partition("->")
    if not arrow:
        names, body = "x", text
    names = names.strip("() ")
    # Allow arithmetic on names of one letter, but nothing that can be called.
    if not re.fullmatch(r"[a-z](\s*,\s*[a-z])*", names):
        return None
    if not re.fullmatch(r"(\b[a-z]\b|[\d\s+*/%<>=!().,-])+", body):
        return None
    made: Any = eval(f"lambda {names}: {body}")
    return made


def _function(name: str) -> Callable[..., Any]:
    known: dict[str, Callable[..., Any]] = {
        "repeat4": lambda x: Dataset.from_tensors(x).repeat(4),
        "repeat_x": lambda x: Dataset.from_tensors(x).repeat(x),
        "range(x).as_ds": Dataset.range,
        "range_to": np.arange,
        "fill": lambda x: np.full(int(x), x),
        "raise_at_3": _raise_at_3,
        "len<3": lambda x: len(x) < 3,
        "size_is_2": lambda x: len(x) == 2,
    }
    found = known.get(name) or _arithmetic(name)
    if found is None:
        raise NotBuilt(f"the function {name}")
    return found


class _Rebatched:
    """The result of TensorFlow's legacy rebatching: all replicas' parts in turn."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset, self._count = dataset, count
        self.element_spec = dataset.rebatch(1).element_spec
        size = dataset.batch_size
        if dataset.drop_remainder and size % count == 0:
            self.element_spec = (
                dataset.unbatch().batch(size // count, True).element_spec
            )

    def cardinality(self) -> int:
        return -2

    def __iter__(self) -> Any:
        for batch in self._dataset:
            yield from pieces_of(batch, self._count, range(self._count))


def _arrays(value: Any) -> Any:
    return np.array(value)


def _slices(value: Any, **options: bool) -> Any:
    is_tuple = options.get("tuple") and isinstance(value[0], list)
    arrays = tuple(map(_arrays, value)) if is_tuple else _arrays(value)
    return Dataset.from_tensor_slices(arrays)


def _columns(value: Any) -> Any:
    return Dataset.from_tensor_slices({k: _arrays(v) for k, v in value.items()})


def _generator(count: int) -> Any:
    signature = ArraySpec((), np.dtype(np.int64))
    return Dataset.from_generator(
        lambda: iter(range(count)), output_signature=signature
    )


_SOURCES: dict[str, Callable[..., Any]] = {
    "range": Dataset.range,
    "from_tensor_slices": _slices,
    "from_tensor_slices_dict": _columns,
    "from_tensors": lambda value: Dataset.from_tensors(_arrays(value)),
    "from_generator": _generator,
}


def _source(op: str, args: list[Any], kw: dict[str, Any], folder: Path) -> Any:
    if op in _SOURCES:
        return _SOURCES[op](*args, **kw)
    if op == "zip":
        return Dataset.zip(tuple(build(part, folder) for part in args))
    if op == "choose":
        parts = [build(part, folder) for part in args[0]]
        return Dataset.choose_from_datasets(parts, build(args[1], folder), **kw)
    if op == "sample":
        parts = [build(part, folder) for part in args[0]]
        return Dataset.sample_from_datasets(parts, **kw)
    if op == "files" and kw.pop("slices", None):
        return Dataset.from_tensor_slices([str(folder / _base(n)) for n in args[0]])
    if op == "files":
        return Dataset.list_files(str(folder / _base(args[0])), **kw)
    if op == "text":
        return Dataset.from_text_files([str(folder / _base(n)) for n in args[0]])
    raise NotBuilt(f"the source {op}")


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _next(
    dataset: Any, op: str, args: list[Any], kw: dict[str, Any], folder: Any
) -> Any:
    if op == "concatenate":
        return dataset.concatenate(build(args[0], folder))
    if op in ("map", "filter", "interleave", "flat_map", "take_while"):
        return getattr(dataset, op)(_function(args[0]), **kw)
    if op == "policy":
        return dataset.with_options(DatasetOptions(auto_shard_policy=args[0]))
    if op == "auto_shard":
        return dataset.auto_shard(*args)
    if op == "rebatch_legacy":
        return _Rebatched(dataset, *args)
    if op == "rebatch_distribute":
        return dataset.rebatch(*args, **kw)
    if op == "interleave_text":
        return dataset.interleave(Dataset.from_text_files, **kw)
    if op == "hint_shard":
        return dataset.shard(SHARD_HINT, SHARD_HINT)
    if not hasattr(dataset, op):
        raise NotBuilt(f"the method {op}")
    return getattr(dataset, op)(*args, **kw)


def build(program: list[Any], folder: Path) -> Any:
    """Return the dataset of a program; ``folder`` has the program's files."""
    dataset = None
    for op, *args in program:
        keywords = {}
        if args and isinstance(args[-1], dict) and op != "from_tensor_slices_dict":
            keywords = dict(args.pop())
        if dataset is None:
            dataset = _source(op, args, keywords, folder)
        else:
            dataset = _next(dataset, op, args, keywords, folder)
    return dataset


def plain(element: Any) -> Any:
    """Return an element as JSON values."""
    if isinstance(element, (tuple, list)):
        return [plain(part) for part in element]
    if isinstance(element, dict):
        return {key: plain(part) for key, part in element.items()}
    return element.tolist() if hasattr(element, "tolist") else element


def spec_text(spec: Any) -> str:
    """Return the text with which TensorFlow shows specs."""

    class Shown:
        def __init__(self, leaf: ArraySpec) -> None:
            self.leaf = leaf

        def __repr__(self) -> str:
            shape = "<unknown>" if self.leaf.shape is None else self.leaf.shape
            kind = self.leaf.dtype
            name = "string" if kind.kind in "US" else kind.name
            return f"TensorSpec(shape={shape}, dtype=tf.{name}, name=None)"

    leaves, structure = flatten(spec)
    return str(unflatten(structure, [Shown(leaf) for leaf in leaves]))


def outcome(program: list[Any], folder: Path) -> dict[str, Any]:
    """Run a program; return its results in the form of TensorFlow's results."""
    result: dict[str, Any] = {}
    elements: list[Any] | None = None
    try:
        dataset = build(program, folder)
        result["cardinality"] = dataset.cardinality()
        result["element_spec"] = spec_text(dataset.element_spec)
        iterator = iter(dataset)
        elements = []
        for _ in range(_MOST_ELEMENTS):
            try:
                elements.append(plain(next(iterator)))
            except StopIteration:
                break
        else:
            result["truncated"] = True
        result["output"] = elements
    except NotBuilt:
        raise
    except Exception as error:
        result["output_before_error"] = elements
        result["error"] = f"{type(error).__name__}: {error}"
    return result


def distributed_program(text: str, folder: Path) -> Any:
    """Return the dataset of a text such as ``range(5).batch(4).repeat(2)``."""
    source = re.match(r"range\(([\d, ]+)\)", text)
    if source:
        dataset = Dataset.range(*map(int, source[1].split(",")))
        rest = text[source.end() :]
    elif re.match(r"\d+ files .*?interleave\(cycle (\d+)\)", text):
        found = re.match(r"\d+ files .*?interleave\(cycle (\d+)\)", text)
        assert found is not None
        names = sorted(str(path) for path in folder.glob("*.txt"))
        dataset = Dataset.from_tensor_slices(names).interleave(
            Dataset.from_text_files, cycle_length=int(found[1])
        )
        rest = text[found.end() :]
    else:
        raise NotBuilt(f"the source of {text}")
    for method, given in re.findall(r"\.(\w+)\(([^)]*)\)", rest):
        args, kw = [], {}
        for part in filter(None, given.split(",")):
            name, equals, value = part.partition("=")
            number = {"True": True, "False": False}.get(value or name)
            number = int(value or name) if number is None else number
            if equals:
                kw[name.strip()] = number
            else:
                args.append(number)
        dataset = getattr(dataset, method)(*args, **kw)
    words = rest.split()
    if words and words[-1] in ("AUTO", "FILE", "DATA", "OFF", "HINT"):
        dataset = dataset.with_options(DatasetOptions(words[-1]))
    return dataset


def write_files(files: dict[str, list[str]], folder: Path) -> None:
    """Write the text files that programs read."""
    for name, lines in files.items():
        text = "".join(f"{line}\n" for line in lines)
        (folder / name).write_text(text, encoding="utf-8")
