"""Parts of the checkpoint engine: layout, disk writes, records; and damaged files."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import io
import itertools
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpcstrat as hs
from hpcstrat.checkpoint import disk
from hpcstrat.checkpoint.file.commit_record import (
    Blocks,
    read_verdict,
    room_bytes,
    write_verdict,
)
from hpcstrat.checkpoint.file.division import of_regions, of_rows
from hpcstrat.checkpoint.file.extents import (
    Extent,
    FileLayout,
    choose_block_bytes,
    part_of,
)
from hpcstrat.checkpoint.file.image import Image, ImageMemory, as_bytes, fill
from hpcstrat.checkpoint.file.plain_state import as_text
from hpcstrat.checkpoint.file.reader import CheckpointFile, check, open_checkpoint
from hpcstrat.checkpoint.file.schema import Entry, Header
from hpcstrat.checkpoint.file.skeleton import Skeleton, packed_python
from hpcstrat.checkpoint.keep import folder
from hpcstrat.checkpoint.save import part_exchange, part_writer, pending_save
from hpcstrat.engine.file_bytes import PAGE_BYTES, read_into, write_all
from hpcstrat.engine.topology import process_stat
from hpcstrat.errors import CheckpointError, CorruptCheckpointError
from tests.folders import listed

DTYPES = ("float32", "bool", "int64", "complex128", "float16", "uint8")


def _header(num_datasets: int, large: int) -> Header:
    header = Header(7, 3)
    shapes = ((), (5,), (0, 3), (large,), (33, 2))
    for number in range(num_datasets):
        path = f"variables/größe {number % 7}/v{number}"
        header.entries[path] = Entry(
            *(path, shapes[number % 5], DTYPES[number % 6], "on_read", "none", True),
            per_replica=number % 5 == 4,
        )
    header.iterators["data"] = {"epoch": 3, "num_rows": 2**40}
    header.iterators["noise"] = {
        "bit_generator": "Philox",
        "root_entropy": 5,
        "state": np.arange(36, dtype=np.uint64).reshape(3, 12),
    }
    header.python["state"] = as_text("state", {"number": 1})
    return header


@pytest.mark.parametrize("num_datasets", [0, 1, 9, 300])
@pytest.mark.parametrize("large", [1, 4096, 200_000])
def test_hdf5_keeps_its_structures_away_from_the_data(
    num_datasets: int, large: int, tmp_path: Path
) -> None:
    header = _header(num_datasets, large)
    python = packed_python(header)
    made = Skeleton(header, python)
    plan, path = made.plan, tmp_path / "file.h5"
    path.write_bytes(made.prefix(header, 99))
    os.truncate(path, plan.size)
    # Fill the data with other bytes; names and types must not change.
    with open(path, "r+b") as file:
        file.seek(plan.data_start)
        file.write(b"\xff" * (plan.size - plan.data_start))
    with h5py.File(path, "r") as found:
        assert found.attrs["step"] == 7
        assert found.attrs["created_unix_ns"] == 99
        assert found["iterators/data"].attrs["num_rows"] == 2**40
        assert found["rng/noise"].attrs["bit_generator"] == b"Philox"
        for name, entry in header.entries.items():
            assert found[name].shape == entry.shape
            assert found[name].attrs["dtype"] == entry.dtype.encode()
            assert ("replica_axis" in found[name].attrs) is entry.per_replica
            raw = found[name].id.get_offset()
            assert raw is None or plan.data_start <= raw < plan.data_end
        assert found["hpcstrat/commit"].id.get_offset() == plan.data_end
        table = found["hpcstrat/block_xxh3_64"]
        assert table.attrs["data_start"] == plan.data_start
        assert table.size >= plan.num_blocks
    assert made.fits(header, python)
    header.python["state"] = as_text("state", {"text": "x" * 999})
    assert not made.fits(header, packed_python(header))
    made.close()


def test_skeletons_serve_for_many_saves_and_leave_nothing_open() -> None:
    header = _header(20, 100)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        made = Skeleton(header, packed_python(header))
        for step in range(5):
            header.step = step
            header.iterators["data"]["epoch"] = step
            prefix = made.prefix(header, step)
            assert len(prefix) == made.plan.data_start
        del made
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_an_interrupt_while_hdf5_writes_reaches_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted HDF5 file stays open, and HDF5 would write to it much later."""
    header = _header(3, 100)
    made, left = Skeleton(header, packed_python(header)), []

    class Interrupted(h5py.File):  # type: ignore[misc]
        def __enter__(self) -> Any:
            self.attrs.modify("step", np.int64(8))
            left.append(self)
            raise KeyboardInterrupt

        def __exit__(self, *error: object) -> None:
            """Do nothing: the interrupt arrives before this call."""

    monkeypatch.setattr(h5py, "File", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.prefix(header, 1)
    monkeypatch.undo()
    assert not made.fits(header, packed_python(header))
    made.close()
    # Use up all file descriptor numbers that are free now.
    paths = [tmp_path / str(number) for number in range(8)]
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(open(path, "w+b"))
        left.pop()
        gc.collect()
    assert [path.stat().st_size for path in paths] == [0] * 8


@given(
    sizes=st.lists(st.integers(1, 300), max_size=12),
    gaps=st.lists(st.integers(0, 100), min_size=13, max_size=13),
    block=st.sampled_from([32, 64, 256]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_blocks_hold_every_byte_once(
    sizes: list[int], gaps: list[int], block: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    place, extents, values = 64, [], {}
    for number, (size, gap) in enumerate(zip(sizes, gaps, strict=False)):
        place += gap
        extents.append(Extent(f"v{number}", place, size))
        values[f"v{number}"] = draw.integers(1, 256, size, np.uint8)
        place += size
    end = place + gaps[-1]
    plan = FileLayout(32, 64, end, block, tuple(extents))
    wanted = np.zeros(end, np.uint8)
    for extent in extents:
        wanted[extent.offset : extent.stop] = values[extent.path]
    found = np.full(end, 77, np.uint8)
    found[:64] = 0
    slot = np.full(block, 99, np.uint8)
    for number in range(plan.num_blocks):
        start, stop = plan.span(number)
        fill(slot, plan, number, values)
        found[start:stop] = slot[: stop - start]
    np.testing.assert_array_equal(found, wanted)
    for extent in extents:
        blocks = plan.blocks_of(extent.offset, extent.stop)
        assert plan.span(blocks[0])[0] <= extent.offset
        assert plan.span(blocks[-1])[1] >= extent.stop


@given(count=st.integers(0, 200), size=st.integers(1, 20))
def test_parts_are_equal_and_complete(count: int, size: int) -> None:
    parts = [part_of(count, rank, size) for rank in range(size)]
    assert [index for part in parts for index in part] == list(range(count))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


_DIVIDED = st.tuples(
    st.integers(1, 400),
    st.sampled_from(["", "replica", "group", "inside"]),
    st.integers(0, 60),
)


def _regions(draw: Any, shape: tuple[int, ...], count: int) -> list[tuple[slice, ...]]:
    """Return the part of each rank of a replica, divided along one or two axes."""
    grids = [
        grid
        for grid in itertools.product(range(1, 7), repeat=len(shape))
        if np.prod(grid) == count
    ]
    grid = grids[draw.integers(len(grids))]
    ends = [
        np.sort([0, length, *draw.integers(0, length + 1, parts - 1)])
        for length, parts in zip(shape, grid, strict=True)
    ]
    return [
        tuple(
            slice(int(cuts[index]), int(cuts[index + 1]))
            for cuts, index in zip(ends, place, strict=True)
        )
        for place in np.ndindex(grid)
    ]


def _divided_plan(
    datasets: list[tuple[int, str, int]], block: int, size: int
) -> tuple[FileLayout, dict[str, Any]]:
    """Return a layout, and the bytes of each dataset; of some, ranks have parts."""
    place, extents, values = 64, [], {}
    draw = np.random.default_rng([len(datasets), size])
    # Draw groups of replicas of unequal sizes, whose members are not adjacent.
    groups = min(size, 1 + len(datasets) % 3)
    group_of = [*range(groups), *draw.integers(0, groups, size - groups).tolist()]
    inner = int(draw.choice([n for n in range(1, min(size, 6) + 1) if size % n == 0]))
    for number, (length, axis, gap) in enumerate(datasets):
        itemsize = int(draw.choice([1, 2, 8]))
        shape, division = (length,), None
        if axis in ("replica", "group"):
            row_of = range(size) if axis == "replica" else group_of
            shape = (max(row_of) + 1, length)
            division = of_rows(shape, itemsize, row_of)
        elif axis == "inside":
            shape = tuple(draw.integers(1, 8, draw.integers(1, 4)).tolist())
            division = of_regions(shape, itemsize, _regions(draw, shape, inner), size)
        nbytes = int(np.prod(shape)) * itemsize
        extents.append(Extent(f"v{number}", place, nbytes, division))
        values[f"v{number}"] = draw.integers(1, 256, nbytes, np.uint8)
        place += nbytes + gap
    return FileLayout(32, 64, place, block, tuple(extents)), values


def _own_part(extent: Extent, rank: int, value: Any) -> Any:
    """Return the bytes of a rank's part, in C order."""
    division = extent.division
    assert division is not None
    part = division.part_of[rank]
    if part < 0:
        return value[:0]
    return value.reshape(division.shape)[division.box(part)].reshape(-1)


@given(
    datasets=st.lists(_DIVIDED, min_size=1, max_size=8),
    block=st.sampled_from([32, 64, 256]),
    size=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_ranks_write_most_of_their_parts_and_equally_many_blocks(
    datasets: list[tuple[int, str, int]], block: int, size: int
) -> None:
    plan, _ = _divided_plan(datasets, block, size)
    parts = plan.parts(size)
    assert sorted(number for part in parts for number in part) == [
        *range(plan.num_blocks)
    ]
    assert all(list(part) == sorted(part) for part in parts)
    mine: list[set[int]] = [set() for _ in range(size)]
    for extent in plan.divided:
        assert extent.division is not None
        where = np.arange(extent.nbytes).reshape(extent.division.shape)
        for number, holders in extent.division.holders.items():
            places = where[extent.division.box(number)].reshape(-1)
            if (np.diff(places) != 1).any():
                continue
            start, stop = extent.offset + places[0], extent.offset + places[-1] + 1
            for index in plan.blocks_of(start, stop):
                low, high = plan.span(index)
                if 2 * (min(stop, high) - max(start, low)) > block:
                    [rank] = [r for r, part in enumerate(parts) if index in part]
                    assert rank in holders
                    mine[rank].add(index)
    # A rank with blocks of others has as many blocks as the least rank, or one more.
    least = min(map(len, parts))
    for own, part in zip(mine, parts, strict=True):
        assert len(part) in (len(own), least, least + 1)


class _Sent:
    """Stands for MPI: `Alltoallv` keeps what each rank sends, and then delivers it."""

    def __init__(self, size: int) -> None:
        self.mpi = self
        self.BYTE = None
        self.moved: list[dict[int, Any]] = [{} for _ in range(size)]
        self.rank, self.arrives = 0, False

    def Alltoallv(self, sent: Any, received: Any) -> None:  # noqa: N802
        buffer, (counts, _), _ = sent
        if not self.arrives:
            pieces = np.split(buffer[: sum(counts)].copy(), np.cumsum(counts)[:-1])
            self.moved[self.rank] = dict(enumerate(pieces))
            return
        buffer, (counts, _), _ = received
        found = [moved[self.rank] for moved in self.moved]
        assert [each.size for each in found] == counts
        assert not counts[self.rank]
        buffer[: sum(counts)] = np.concatenate(found)


@given(
    datasets=st.lists(_DIVIDED, min_size=1, max_size=8),
    block=st.sampled_from([32, 64, 256]),
    size=st.integers(1, 6),
    at_a_time=st.sampled_from([1, 100, 1000, 1 << 20]),
)
@settings(max_examples=150, deadline=None)
def test_parts_come_to_where_they_are_written(
    datasets: list[tuple[int, str, int]], block: int, size: int, at_a_time: int
) -> None:
    plan, values = _divided_plan(datasets, block, size)
    shares: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_exchange, "_ROUND_BYTES", at_a_time)
        rounds = []
        for rank in range(size):
            own = {
                extent.path: part_exchange.DividedDataset(
                    extent, rank, _own_part(extent, rank, values[extent.path])
                )
                for extent in plan.divided
            }
            shares.append(own)
            rounds.append(part_exchange._rounds(plan, own, (rank, size)))
    comm, wanted, found = (
        _Sent(size),
        np.empty(block, np.uint8),
        np.empty(block, np.uint8),
    )

    def check(rank: int, numbers: Any) -> None:
        for number in numbers:
            fill(wanted, plan, number, values)
            fill(found, plan, number, values | shares[rank])
            start, stop = plan.span(number)
            assert found[: stop - start].tobytes() == wanted[: stop - start].tobytes()

    for together in zip(*rounds, strict=True):
        for comm.arrives in (False, True):
            for comm.rank, each in enumerate(together):
                assert part_exchange._size(each.received) <= max(at_a_time, block)
                sent, received = (
                    np.empty(part_exchange._size(some), np.uint8)
                    for some in (each.sent, each.received)
                )
                part_exchange._exchange(each, sent, received, comm)
                if comm.arrives:
                    check(comm.rank, each.blocks)
    for rank, mixed in enumerate(plan.mixed_blocks(size) if plan.divided else ()):
        check(rank, sorted({*plan.parts(size)[rank]} - {*mixed}))


@given(nbytes=st.integers(0, 1 << 45), replicas=st.integers(1, 5000))
def test_blocks_are_stripes(nbytes: int, replicas: int) -> None:
    size = choose_block_bytes(nbytes, replicas)
    assert size & (size - 1) == 0
    assert 1 << 20 <= size <= 16 << 20


@pytest.mark.parametrize("dtype", [">i4", "<f8", "c8", "?", "bfloat16"])
def test_values_are_stored_little_endian(dtype: str) -> None:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    value = np.arange(12).astype(dtype).reshape(3, 4)[:, ::2]
    kind = np.dtype(dtype)
    little = value if kind.name == "bfloat16" else value.astype(kind.newbyteorder("<"))
    assert as_bytes(value).tobytes() == little.tobytes()
    assert as_bytes(value[1, 1]).size == value.itemsize


def test_images_lie_on_pages() -> None:
    image = Image(3, PAGE_BYTES * 2)
    for index in range(3):
        assert image.slot(index).ctypes.data % PAGE_BYTES == 0
    image.slot(1)[:] = 7
    assert not image.slot(0).any()
    assert not image.slot(2).any()


def test_memory_is_used_again_as_long_as_it_suffices() -> None:
    memory = ImageMemory()
    memory.image(3, PAGE_BYTES * 2).slot(0)[0] = 7
    assert memory.image(6, PAGE_BYTES).slot(0)[0] == 7
    assert memory.image(7, PAGE_BYTES).slot(0)[0] == 0
    memory.release()
    assert memory.image(1, PAGE_BYTES).slot(0)[0] == 0


def test_lent_memory_can_be_used_again() -> None:
    memory = ImageMemory()
    memory.lend()
    first = memory.image(3, PAGE_BYTES).slot(0)
    memory.lend()
    again = memory.image(3, PAGE_BYTES)
    assert again.slot(0).ctypes.data == first.ctypes.data
    again.slot(1)[:] = 5
    assert (memory.image(3, PAGE_BYTES).slot(1) == 5).all()


def test_memory_that_is_left_stays_with_its_image() -> None:
    memory = ImageMemory()
    image = memory.image(2, PAGE_BYTES)
    image.slot(0)[:] = 3
    memory.leave()
    memory.image(2, PAGE_BYTES).slot(0)[:] = 4
    assert (image.slot(0) == 3).all()


def _mapping(image: Image) -> dict[str, str]:
    """Return the entry of Linux's smaps for the memory of an image."""
    address = image.slot(0).ctypes.data
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ....", line):
            low, high = (int(each, 16) for each in match.groups())
            inside = low <= address < high
        elif inside:
            name, _, text = line.partition(":")
            found[name] = text
    return found


NEEDS_SMAPS = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="there is no smaps"
)


@NEEDS_SMAPS
def test_memory_may_have_large_pages() -> None:
    image = ImageMemory().image(2, 4 << 20)
    flags = _mapping(image)["VmFlags"]
    # The flag "sh" marks memory shared between processes, "hg" memory for huge pages.
    assert " sh" not in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert " hg" in flags


@NEEDS_SMAPS
def test_memory_that_is_not_used_again_stays_lent() -> None:
    memory = ImageMemory()
    image = memory.image(8, 4 << 20)
    for index in range(8):
        image.slot(index)[:] = 1
    memory.lend()
    all_kib = 8 * 4 << 10
    assert _mapping(image)["LazyFree"].split() == [str(all_kib), "kB"]
    memory.image(2, 4 << 20)
    kib = int(_mapping(image)["LazyFree"].split()[0])
    assert all_kib // 2 <= kib <= all_kib * 3 // 4


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
@pytest.mark.parametrize(
    ("state", "flags", "stays"),
    [("S", 0x400000, True), ("R", 0x400004, False), ("Z", 0x400004, False)],
)
def test_files_of_processes_that_end_are_removed(
    state: str, flags: int, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, fields = Path("/proc/self/stat").read_text().rpartition(")")
    words = fields.split()
    words[0], words[6] = state, str(flags)
    text = f"{name}) {' '.join(words)}"
    left = tmp_path / folder.temporary_name("ckpt-0000000001.h5")
    left.touch()

    def opened(path: str, **options: Any) -> Any:
        return io.StringIO(text) if path.endswith("stat") else open(path, **options)

    monkeypatch.setattr(process_stat, "open", opened, raising=False)
    folder.remove_abandoned(str(tmp_path))
    assert left.exists() == stays


def test_children_do_not_share_memory() -> None:
    memory = ImageMemory()
    image = memory.image(1, PAGE_BYTES)
    image.slot(0)[:] = 7
    child = os.fork()
    if child == 0:
        os._exit(int(image.slot(0)[0]))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (image.slot(0) == 7).all()


def test_children_do_not_end_saves_of_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, write = threading.Event(), part_writer.write_all

    def late(*args: Any) -> None:
        goes_on.wait(60)
        write(*args)

    monkeypatch.setattr(part_writer, "write_all", late)
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(np.ones(1000)))
    manager.save(1, asynchronous=True)
    child = os.fork()
    if child == 0:
        pending_save.finish_all()
        pending_save.give_up_all(RuntimeError("the child fails"))
        os._exit(0)
    os.waitpid(child, 0)
    goes_on.set()
    manager.close()
    assert len(manager.checkpoints) == 1


@pytest.mark.parametrize("direct", [False, True])
def test_short_and_refused_calls_are_gone_on_with(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "file")
    image = Image(2, 1 << 16)
    data = image.slot(0)
    data[:] = np.random.default_rng(1).integers(0, 256, data.size, np.uint8)
    disk.create(path, data.size)
    write, read = os.pwrite, os.preadv
    calls: list[int] = []

    def shorter(file: int, part: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, part[: 4096 if len(calls) == 2 else 1000], offset)

    def fewer(file: int, parts: Any, offset: int) -> int:
        return read(file, [parts[0][:5000]], offset)

    file = disk.open_to_write(path, direct)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", shorter)
        if direct and disk._DIRECT:
            write_all(file, data.data, 0)
            assert len(calls) > 60
        else:
            with pytest.raises(OSError, match="Invalid argument"):
                write_all(file, data.data, 0)
            write_all(file, data.data, 0)
    os.close(file)
    assert Path(path).read_bytes() == data.tobytes()
    file = disk.open_to_read(path, direct)
    monkeypatch.setattr(os, "preadv", fewer)
    read_into(file, image.slot(1).data, 0)
    assert image.slot(1).tobytes() == data.tobytes()
    with pytest.raises(EOFError):
        read_into(file, image.slot(1).data, PAGE_BYTES)
    os.close(file)


def test_full_disk_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"space|large"):
        disk.create(str(tmp_path / "file"), 1 << 60)
    assert os.listdir(tmp_path) == []


def test_full_disk_is_found_without_reservations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(disk, "_allocate", refuse)
    with pytest.raises(OSError, match="space"):
        disk.create(str(tmp_path / "file"), 1 << 60)
    disk.create(str(tmp_path / "small"), 5000)
    assert (tmp_path / "small").stat().st_size == 5000
    assert os.listdir(tmp_path) == ["small"]


def test_verdicts_are_read_when_they_are_whole(tmp_path: Path) -> None:
    path, nonce, other = str(tmp_path / "file"), b"n" * 16, b"o" * 16
    plan = FileLayout(4096, 8192, 8192 + 700 * 4096, 4096)
    disk.create(path, plan.size + room_bytes(plan, 3))
    hashes = np.arange(700, dtype=np.uint64) ** 3
    for rank in range(3):
        assert read_verdict(path, plan, (rank, 3), nonce) is None
    for rank in (2, 0):
        part = part_of(700, rank, 3)
        own = hashes[part.start : part.stop]
        write_verdict(path, plan, (rank, 3), nonce, own)
        np.testing.assert_array_equal(read_verdict(path, plan, (rank, 3), nonce), own)
        assert read_verdict(path, plan, (rank, 3), other) is None
    assert read_verdict(path, plan, (1, 3), nonce) is None
    write_verdict(path, plan, (1, 3), nonce, errno.EIO)
    assert read_verdict(path, plan, (1, 3), nonce) == errno.EIO
    # A record of which only half is visible, as on a network file system, is no record.
    with open(path, "r+b") as file:
        file.seek(plan.size + 60)
        file.write(b"\xff")
    assert read_verdict(path, plan, (0, 3), nonce) is None


def test_verdicts_of_unequal_parts_have_room(tmp_path: Path) -> None:
    path, nonce = str(tmp_path / "file"), b"n" * 16
    plan = FileLayout(4096, 8192, 8192 + 700 * 4096, 4096)
    plan._parts[3] = (range(10), [*range(10, 699)], range(699, 700))
    disk.create(path, plan.size + room_bytes(plan, 3))
    for rank in (2, 1, 0):
        own = np.arange(len(plan.parts(3)[rank]), dtype=np.uint64) + rank
        write_verdict(path, plan, (rank, 3), nonce, own)
    for rank in (0, 1, 2):
        own = np.arange(len(plan.parts(3)[rank]), dtype=np.uint64) + rank
        np.testing.assert_array_equal(read_verdict(path, plan, (rank, 3), nonce), own)
    assert os.path.getsize(path) == plan.size + room_bytes(plan, 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of three blocks."""
    folder = tmp_path_factory.mktemp("whole")
    value = np.random.default_rng(5).standard_normal(300_000)
    objects = {"x": hs.Variable(value), "small": hs.Variable(np.arange(3))}
    return Path(hs.CheckpointManager(folder, **objects).save(5))


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint ``whole``, which a test may damage."""
    return Path(shutil.copy(whole, tmp_path / whole.name))


def _verify(path: Path) -> CheckpointFile:
    """Read a whole checkpoint file, and verify its hashes."""
    found = open_checkpoint(str(path))
    assert found.vouched is not None
    plan = found.vouched.plan
    image = Image(1, plan.block_bytes)
    with Blocks(str(path), found.vouched, False) as blocks:
        for block in range(plan.num_blocks):
            blocks.read(block, image.slot(0))
    return found


def _places(
    size: int, plan: FileLayout, draw: np.random.Generator, count: int
) -> list[int]:
    """Return the begin and end offsets of all parts of a file."""
    edges = (0, plan.table_start, plan.data_start, plan.data_end, size)
    found = [edge for edge in edges if edge < size]
    found += [edge - 1 for edge in edges if edge > 0]
    for start, stop in itertools.pairwise(edges):
        found += draw.integers(start, stop, count // 4).tolist()
    return found


def test_every_flipped_bit_is_found(copied: Path) -> None:
    vouched = _verify(copied).vouched
    assert vouched is not None
    assert vouched.plan.num_blocks == 3
    draw = np.random.default_rng(17)
    size = copied.stat().st_size
    file = os.open(copied, os.O_RDWR)
    for place in _places(size, vouched.plan, draw, 400):
        byte = os.pread(file, 1, place)
        os.pwrite(file, bytes([byte[0] ^ 1 << int(draw.integers(8))]), place)
        with pytest.raises(CorruptCheckpointError):
            _verify(copied)
        os.pwrite(file, byte, place)
    os.close(file)
    _verify(copied)


def test_every_truncation_is_found(copied: Path) -> None:
    content = copied.read_bytes()
    draw = np.random.default_rng(19)
    sizes = [0, 1, 4095, 4096, 4097, len(content) - 1, len(content) - 4096]
    sizes += draw.integers(0, len(content), 60).tolist()
    for size in sizes:
        copied.write_bytes(content[:size])
        with pytest.raises(CorruptCheckpointError):
            check(str(copied))
    copied.write_bytes(content + b"\0" * 4096)
    with pytest.raises(CorruptCheckpointError):
        check(str(copied))


def test_pages_that_are_zero_old_or_elsewhere_are_found(
    copied: Path, tmp_path: Path
) -> None:
    plan = _plan(copied)
    value = np.random.default_rng(6).standard_normal(300_000)
    objects = {"x": hs.Variable(value), "small": hs.Variable(np.arange(3))}
    manager = hs.CheckpointManager(tmp_path / "other", **objects)
    older = Path(manager.save(5)).read_bytes()
    content = copied.read_bytes()
    assert len(older) == len(content)
    pages = (plan.data_end - plan.data_start) // PAGE_BYTES
    draw = np.random.default_rng(23)
    for page in draw.integers(0, pages - 1, 25).tolist():
        for kind in ("zero", "old", "swapped"):
            damaged = bytearray(content)
            start = plan.data_start + page * PAGE_BYTES
            here = slice(start, start + PAGE_BYTES)
            following = slice(start + PAGE_BYTES, start + 2 * PAGE_BYTES)
            if kind == "zero":
                damaged[here] = bytes(PAGE_BYTES)
            elif kind == "old":
                damaged[here] = older[here]
            else:
                damaged[here], damaged[following] = content[following], content[here]
            if damaged == content:
                continue
            copied.write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError):
                _verify(copied)
    # Replace blocks, hashes or record by those of another file.
    for part in (
        slice(plan.data_start, plan.data_end),
        slice(plan.table_start, plan.data_end),
        slice(0, plan.data_start),
        slice(plan.data_end, len(content)),
    ):
        damaged = bytearray(content)
        damaged[part] = older[part]
        copied.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError):
            _verify(copied)


def _plan(path: Path) -> FileLayout:
    vouched = open_checkpoint(str(path)).vouched
    assert vouched is not None
    return vouched.plan


def test_a_lost_record_makes_no_file_of_version_1(copied: Path) -> None:
    content = bytearray(copied.read_bytes())
    content[-4096:] = bytes(4096)
    copied.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="record"):
        check(str(copied))
    with h5py.File(copied, "r+", libver=("v110", "v110")) as file:
        file.attrs["hpcstrat_format_version"] = np.int64(1)
    with pytest.raises(CorruptCheckpointError):
        check(str(copied))


def test_file_of_another_job_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    managers = [
        hs.CheckpointManager(tmp_path, x=hs.Variable(float(number)))
        for number in range(2)
    ]
    managers[0].save(5)
    # This job detects another job's rename before its check, but none after the check.
    replaces = pending_save.Publication._replaces

    def looked(self: Any) -> bool:
        monkeypatch.setattr(pending_save.Publication, "_replaces", replaces)
        managers[1].save(5, overwrite=True)
        return replaces(self)

    monkeypatch.setattr(pending_save.Publication, "_replaces", looked)
    with pytest.raises(CheckpointError, match="another job"):
        managers[0].save(5, overwrite=True)
    assert len(listed(tmp_path)) == 1
    restored = hs.Variable(9.0)
    assert hs.CheckpointManager(tmp_path, x=restored).restore() == 5
    assert restored.numpy() == 1.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_everything_is_flushed_before_the_next_step(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(np.ones(300_000)))
    happened: list[str] = []
    real = {name: getattr(os, name) for name in ("pwrite", "fsync", "link", "unlink")}

    def noted(name: str, *arguments: Any) -> Any:
        first = arguments[0]
        path = os.readlink(f"/proc/self/fd/{first}") if type(first) is int else first
        kind = "folder" if os.path.isdir(path) else "file"
        if str(path).startswith(str(tmp_path)):
            happened.append(f"{name} {kind}")
        return real[name](*arguments)

    for name in real:
        monkeypatch.setattr(os, name, functools.partial(noted, name))
    manager.save(1, asynchronous=asynchronous)
    manager.wait()
    monkeypatch.undo()
    # The order is: data, then prefix and record, then the name. Each must be on the
    # disk before the next is written.
    found = [key for key, _ in itertools.groupby(happened)]
    assert found == [
        *("pwrite file", "fsync file", "pwrite file", "fsync file"),
        *("link file", "unlink file", "fsync folder"),
    ]
    assert happened.count("pwrite file") >= 3 + 2


@pytest.mark.parametrize("locking", [False, None, True])
def test_a_checkpoint_that_the_program_has_open_is_restored(
    tmp_path: Path, locking: bool | None
) -> None:
    value = hs.Variable(np.arange(3.0), name="value")
    manager = hs.CheckpointManager(tmp_path, value=value)
    path = manager.save(1)
    value.assign(np.zeros(3))
    with h5py.File(path, "r", locking=locking):
        assert manager.restore() == 1
    assert value.numpy().tolist() == [0, 1, 2]
