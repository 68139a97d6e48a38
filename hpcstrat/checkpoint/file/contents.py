"""The contents of a checkpoint file, as HDF5 shows them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import numpy as np
from h5py import h5a

from hpcstrat.checkpoint.disk import open_to_read, read_exactly
from hpcstrat.checkpoint.file.blocks import Blocks
from hpcstrat.checkpoint.file.commit_record import Vouched
from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.checkpoint.file.index import MOST_INDEX_BYTES, from_index
from hpcstrat.checkpoint.file.plain_state import MOST_STATE_BYTES, from_text
from hpcstrat.checkpoint.file.schema import (
    FORMAT,
    FORMAT_VERSION,
    INDEX,
    METRICS,
    UNTYPED_VERSION,
    Entry,
    Header,
)
from hpcstrat.checkpoint.file.structure import (
    attribute,
    attributes,
    datasets,
    member,
    place_of,
    require_stored_as,
)
from hpcstrat.engine.options import VariableAggregation
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError

__all__ = ["header_of", "read_contents"]

_Read = Callable[[h5py.Dataset], bytes]
_AGGREGATIONS = {name.lower() for name in VariableAggregation.__members__}


def header_of(file: h5py.File, vouched: Vouched | None) -> Header:
    """Return what the root of a file says, and its metrics; no entries and no states.

    ``vouched`` is None for a file without hashes, as of format version 1.
    """
    kind = _text(attribute(file, "hpcstrat_format"))
    if kind != FORMAT:
        raise ValueError(f"its format is {kind!r}")
    version = int(attribute(file, "hpcstrat_format_version"))
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"expected a checkpoint of format version {FORMAT_VERSION} or lower, found "
            f"version {version} in {file.filename}; use a newer hpcstrat"
        )
    about = member(file, "hpcstrat")
    # Without a record only version 1 is taken, or a file that was cut could pass as one
    # that never had hashes.
    if vouched is None and (version > 1 or about is not None):
        raise ValueError("it has no commit record")
    step, replicas = attribute(file, "step"), attribute(file, "num_replicas")
    header = Header(int(step), int(replicas))
    if vouched is not None and header.step != vouched.step:
        raise ValueError("its commit record is of another step")
    header.created_unix_ns = int(attribute(file, "created_unix_ns"))
    if h5a.exists(file.id, b"math_threads"):
        header.math_threads = int(attribute(file, "math_threads"))
    metrics = None if about is None else member(about, METRICS.rpartition("/")[2])
    if metrics is not None:
        header.metrics = {name: float(one) for name, one in attributes(metrics)}
    return header


def read_contents(
    file: h5py.File, header: Header, vouched: Vouched | None
) -> dict[str, Extent]:
    """Add to a header all but the values of variables; return where these are.

    By path; values without bytes are not among them.
    """
    start, stop = 0, os.path.getsize(file.filename)
    if vouched is not None:
        # Values elsewhere would not be among what the hashes of blocks vouch for.
        start, stop = vouched.plan.data_start, vouched.plan.data_end
    extents: dict[str, Extent] = {}
    index = None if vouched is None else _index(file, vouched)
    if index is None:
        places = [file["/"]]
    else:
        header.entries, extents = from_index(index, start, stop)
        places = [g for name in ("python", "rng") if (g := member(file, name))]
    for name, dataset in itertools.chain.from_iterable(map(datasets, places)):
        # Only variables are combined over replicas; the table of hashes is not.
        is_value = index is None and h5a.exists(dataset.id, b"aggregation")
        if is_value or name.startswith(("python/", "rng/")):
            extents[name] = Extent(name, *place_of(dataset, start, stop))
        if is_value:
            header.entries[name] = _entry(dataset, name)
    for entry in header.entries.values():
        if entry.aggregation not in _AGGREGATIONS:
            raise ValueError(f"{entry.path} has the aggregation {entry.aggregation!r}")
        _require_rows(entry, header.num_replicas)
    for name, group in (member(file, "iterators") or {}).items():
        header.iterators[name] = {k: int(v) for k, v in attributes(group)}
    if "rng" in file or "python" in file:
        with _reading(file.filename, vouched, extents) as read:
            _read_states(file, header, read)
    return {name: extent for name, extent in extents.items() if extent.nbytes}


@contextlib.contextmanager
def _reading(
    path: str, vouched: Vouched | None, extents: dict[str, Extent]
) -> Iterator[_Read]:
    """Yield what returns the bytes of a dataset, checked where there are hashes."""
    for section in ("python/", "rng/"):
        sizes = [e.nbytes for name, e in extents.items() if name.startswith(section)]
        # Extents of a forged file may overlap: the length of the file is no bound.
        if sum(sizes) > MOST_STATE_BYTES:
            raise ValueError(f"there are {sum(sizes):,} bytes in {section}")
    with contextlib.ExitStack() as stack:
        if vouched is not None:
            part = stack.enter_context(Blocks(path, vouched, False)).part
        else:
            file = open_to_read(path, False)
            stack.callback(os.close, file)

            def part(start: int, stop: int) -> bytes:
                return read_exactly(file, start, stop - start)

        def read(dataset: h5py.Dataset) -> bytes:
            extent = extents[dataset.name.lstrip("/")]
            return part(extent.offset, extent.stop)

        yield read


def _read_states(file: h5py.File, header: Header, read: _Read) -> None:
    typed = int(attribute(file, "hpcstrat_format_version")) > UNTYPED_VERSION
    for name, group in file.get("rng", {}).items():
        header.iterators[name] = {
            "bit_generator": _text(attribute(group, "bit_generator")),
            "root_entropy": int(attribute(group, "root_entropy")),
            "generation": int(attribute(group, "generation")),
            "state": _words(group["state"], read),
            "shared": _words(group["shared"], read),
        }
    for name, dataset in file.get("python", {}).items():
        header.python[name] = from_text(read(dataset), typed=typed)


def _words(dataset: h5py.Dataset, read: _Read) -> Array:
    require_stored_as(dataset, "uint64")
    words = np.frombuffer(read(dataset), "<u8").astype(np.uint64)
    return words.reshape(dataset.shape)


def _index(file: h5py.File, vouched: Vouched) -> bytes | None:
    """Return the index, which the commit record vouches for; None if there is none."""
    dataset = member(file, INDEX)
    if dataset is None:
        return None
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{INDEX} is no dataset")
    offset, nbytes = place_of(dataset, 0, vouched.plan.data_start)
    if nbytes > MOST_INDEX_BYTES:
        raise ValueError(f"its index has {nbytes:,} bytes")
    descriptor = open_to_read(file.filename, False)
    try:
        return read_exactly(descriptor, offset, nbytes)
    finally:
        os.close(descriptor)


def _entry(dataset: h5py.Dataset, name: str) -> Entry:
    # Most have these four, without which the file is refused, and no other.
    has_more = h5a.get_num_attrs(dataset.id) != 4
    entry = Entry(
        name,
        tuple(dataset.shape),
        _text(attribute(dataset, "dtype")),
        _text(attribute(dataset, "synchronization")),
        _text(attribute(dataset, "aggregation")),
        bool(attribute(dataset, "trainable")),
        has_more and bool(h5a.exists(dataset.id, b"replica_axis")),
        has_more and bool(h5a.exists(dataset.id, b"group_axis")),
    )
    require_stored_as(dataset, entry.dtype)
    return entry


def _require_rows(entry: Entry, num_replicas: int) -> None:
    """Refuse a value whose first axis counts something else than it says."""
    if entry.per_replica and entry.shape[:1] != (num_replicas,):
        raise ValueError(f"{entry.path} has not a row for each replica")
    if entry.per_group and not (entry.shape and 1 <= entry.shape[0] <= num_replicas):
        raise ValueError(f"{entry.path} has not a row for each group of replicas")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
