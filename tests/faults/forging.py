"""Restore forged checkpoint files with little memory: ``forging.py FOLDER``.

Each case is a file that links to other files or to a pipe without a writer, that needs
more memory than this process may have, or that has names which are not valid text. Its
hashes, if any, are right. Restoring the newest checkpoint must skip this file, and
restore step 1. The program prints a line for each error; an alarm ends a case that
hangs.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
from click.testing import CliRunner

import hpcstrat as hs
from hpcstrat.checkpoint.file.commit_record import block_hash, pack_record
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.schema import Header, checkpoint_name
from hpcstrat.checkpoint.file.skeleton import Skeleton
from hpcstrat.cli.main import main as command
from hpcstrat.engine.file_bytes import PAGE_BYTES
from hpcstrat.errors import CorruptCheckpointError

VERSION_1 = Path(__file__).parents[1] / "old_files" / "version-1.h5"
HUGE = 6 << 30
_ROOM_BYTES = 1 << 30
_LIMIT_SECONDS = 30


class State:
    """Plain state that a program saves."""

    state: object = None

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


class Long(bytes):
    """Fake plain state with a huge length and no data."""

    def __len__(self) -> int:
        return HUGE


def make_objects() -> dict[str, object]:
    """Return the objects in the files of version 1 and of step 1."""
    weights = hs.Variable(np.zeros((2, 3)), name="w")
    data = hs.Dataset(np.arange(10), 4, shuffle=True, seed=3)
    return {
        "weights": weights,
        "flag": hs.Variable(False),
        "scalar": hs.Variable(np.int32(0)),
        "optimizer": hs.optimizers.SGD(0.5, momentum=0.5),
        "counter": State(),
        "noise": hs.get_strategy().random("noise", seed=3),
        "data": hs.get_strategy().experimental_distribute_dataset(data),
    }


def _replaced(
    file: h5py.File, name: str, shape: tuple[int, ...], dtype: str, **options: object
) -> None:
    attributes = dict(file[name].attrs)
    del file[name]
    file.create_dataset(name, shape, dtype, **options).attrs.update(attributes)


def _early(file: h5py.File, name: str, nbytes: int) -> None:
    """Replace a dataset by one whose space in the file is a hole."""
    del file[name]
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    made.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple((nbytes,))
    h5py.h5d.create(file.id, name.encode(), h5py.h5t.STD_U8LE, space, made)


def _never_written(file: h5py.File, pipe: str) -> None:
    _replaced(file, "python/counter", (HUGE,), "u1")


def _hole(file: h5py.File, pipe: str) -> None:
    _early(file, "python/counter", HUGE)


def _chunks(file: h5py.File, pipe: str) -> None:
    _replaced(file, "python/counter", (HUGE,), "u1", chunks=(1 << 20,), fillvalue=32)


def _bomb(file: h5py.File, pipe: str) -> None:
    shape = (HUGE // 8,)
    options = {"chunks": (1 << 21,), "compression": "gzip", "shuffle": True}
    _replaced(file, "variables/weights", shape, "f8", **options)
    file["variables/weights"][: 1 << 21] = 0


def _compressed(file: h5py.File, pipe: str) -> None:
    _replaced(file, "variables/weights", (2, 3), "<f8", compression="gzip")


def _generator(file: h5py.File, pipe: str) -> None:
    _early(file, "rng/noise/state", HUGE)


def _external_state(file: h5py.File, pipe: str) -> None:
    _replaced(file, "python/counter", (35,), "u1", external=[(pipe, 0, 35)])


def _external_values(file: h5py.File, pipe: str) -> None:
    _replaced(file, "variables/weights", (2, 3), "<f8", external=[(pipe, 0, 48)])


def _external_words(file: h5py.File, pipe: str) -> None:
    _replaced(file, "rng/noise/shared", (12,), "<u8", external=[(pipe, 0, 96)])


def _link_to_pipe(file: h5py.File, pipe: str) -> None:
    del file["python/counter"]
    file["python/counter"] = h5py.ExternalLink(pipe, "/counter")


def _group_elsewhere(file: h5py.File, pipe: str) -> None:
    del file["python"]
    file["python"] = h5py.ExternalLink(pipe, "/python")


def _record_elsewhere(file: h5py.File, pipe: str) -> None:
    file.pop("hpcstrat", None)
    file["hpcstrat"] = h5py.ExternalLink(pipe, "/hpcstrat")


def _soft_link(file: h5py.File, pipe: str) -> None:
    del file["python/counter"]
    file["python/counter"] = h5py.SoftLink("/variables/weights")


def _virtual(file: h5py.File, pipe: str) -> None:
    attributes = dict(file["variables/weights"].attrs)
    del file["variables/weights"]
    layout = h5py.VirtualLayout((2, 3), "<f8")
    layout[...] = h5py.VirtualSource(pipe, "weights", (2, 3))
    made = file.create_virtual_dataset("variables/weights", layout)
    made.attrs.update(attributes)


def _endless_virtual(file: h5py.File, pipe: str) -> None:
    """Make a virtual dataset whose shape HDF5 reads from its source, a pipe."""
    attributes = dict(file["variables/weights"].attrs)
    del file["variables/weights"]
    layout = h5py.VirtualLayout((2, 3), "<f8", maxshape=(None, 3))
    source = h5py.VirtualSource(pipe, "weights", (2, 3), "<f8", maxshape=(None, 3))
    endless = slice(0, h5py.h5s.UNLIMITED)
    layout[endless, :] = source[endless, :]
    made = file.create_virtual_dataset("variables/weights", layout)
    made.attrs.update(attributes)


def _text_of_any_length(file: h5py.File, pipe: str) -> None:
    file["variables/weights"].attrs["dtype"] = "float64"


def _many_numbers(file: h5py.File, pipe: str) -> None:
    file["iterators/data"].attrs["epoch"] = np.zeros(5000, np.int64)


def _other_type(file: h5py.File, pipe: str) -> None:
    _replaced(file, "variables/weights", (2, 3), "<i8", data=np.ones((2, 3)))


def _name_of_value(file: h5py.File, pipe: str) -> None:
    file["variables"].move("scalar", b"\xff\xfe")


def _name_of_state(file: h5py.File, pipe: str) -> None:
    file["python"].move("counter", b"\xff\xfe")


def _name_of_position(file: h5py.File, pipe: str) -> None:
    group = file["iterators/data"]
    h5py.h5a.create(
        group.id, b"\xff\xfe", h5py.h5t.NATIVE_INT64, h5py.h5s.create(h5py.h5s.SCALAR)
    )


def _deep(file: h5py.File, pipe: str) -> None:
    group = file["variables"].id
    for _ in range(100_000):
        group = h5py.h5g.create(group, b"a")


def _circle(file: h5py.File, pipe: str) -> None:
    for name in ("one", "other"):
        file[f"variables/{name}"] = file["/"]


CASES: tuple[Callable[[h5py.File, str], None], ...] = (
    *(_never_written, _hole, _chunks, _bomb, _compressed, _generator),
    *(_external_state, _external_values, _external_words, _link_to_pipe),
    *(_group_elsewhere, _record_elsewhere, _soft_link, _virtual, _endless_virtual),
    *(_text_of_any_length, _many_numbers, _other_type),
    *(_deep, _circle, _name_of_value, _name_of_state, _name_of_position),
)


def _seal(path: Path) -> None:
    """Convert a file to version 2: add hashes at the front, and a record at the end."""
    with h5py.File(path, "r+") as file:
        file.attrs["hpcstrat_format_version"] = np.int64(2)
    content = path.read_bytes()
    content = content.ljust(-(-len(content) // PAGE_BYTES) * PAGE_BYTES, b"\0")
    # HDF5 also searches for its superblock at this offset.
    plan = FileLayout(8, PAGE_BYTES, PAGE_BYTES + len(content), 1 << 20)
    whole = memoryview(bytes(PAGE_BYTES) + content)
    spans = map(plan.span, range(plan.num_blocks))
    hashes = np.array([block_hash(whole[a:b]) for a, b in spans], "<u8")
    prefix = (bytes(8) + hashes.tobytes()).ljust(PAGE_BYTES, b"\0")
    path.write_bytes(prefix + content + pack_record(plan, prefix, 12, 1))


def _hole_with_hashes(path: Path) -> None:
    """Make a file of version 2 with huge plain state, and with valid hashes."""
    skeleton = Skeleton(Header(12, 1), {"counter": Long()})
    plan, prefix = skeleton.plan, skeleton.prefix(Header(12, 1), 1)
    zeros = memoryview(bytes(plan.block_bytes))
    hashes = dict.fromkeys(
        {b - a for a, b in map(plan.span, range(plan.num_blocks))}, 0
    )
    for size in hashes:
        hashes[size] = block_hash(zeros[:size])
    table = np.zeros(plan.num_blocks, "<u8")
    for block in range(plan.num_blocks):
        start, stop = plan.span(block)
        table[block] = hashes[stop - start]
    prefix[plan.table_start : plan.table_start + table.nbytes] = table.tobytes()
    with path.open("wb") as file:
        file.write(prefix)
        file.seek(plan.data_end)
        file.write(pack_record(plan, bytes(prefix), 12, 1))


def _endless_prefix(path: Path) -> None:
    """Make a file whose record declares nearly all bytes as structures."""
    plan = FileLayout(PAGE_BYTES, HUGE, HUGE, 1 << 20)
    with path.open("wb") as file:
        file.write(b"\x89HDF\r\n\x1a\n")
        file.seek(HUGE)
        # The hash is wrong, because the reader must refuse the file before comparing
        # it.
        file.write(pack_record(plan, b"", 12, 1))


def forged(path: Path, pipe: str) -> Iterator[str]:
    """Make the forged files one after the other, and yield their descriptions."""
    for case in CASES:
        for version in (1, 2):
            shutil.copy(VERSION_1, path)
            with h5py.File(path, "r+", libver=("v110", "v110")) as file:
                case(file, pipe)
            if version == 2:
                if path.stat().st_size > HUGE:
                    continue
                _seal(path)
            yield f"{case.__name__} of version {version}"
            path.unlink()
    for make in (_hole_with_hashes, _endless_prefix):
        make(path)
        yield make.__name__
        path.unlink()


def try_one(path: Path) -> str:
    """Try to restore a forged file; return an error's description or an empty text."""
    objects = make_objects()
    manager = hs.CheckpointManager(path.parent, **objects)
    try:
        manager.restore(path)
    except CorruptCheckpointError as error:
        said = str(error)
    else:
        return "it was restored"
    if manager.restore() != 1 or objects["counter"].state_dict() != "as it was":
        return "the older one was not restored"
    shown = CliRunner().invoke(command, ["ckpt", "verify", str(path)])
    if shown.exit_code != 1 or not re.search("DAMAGED", shown.output):
        return f"verify says {shown.output}"
    print(f"  {said}")
    return ""


def main() -> None:
    """Try all forged files, and print errors."""
    folder = Path(sys.argv[1])
    objects = make_objects()
    objects["counter"].load_state_dict("as it was")
    hs.CheckpointManager(folder, **objects).save(1)
    pipe = str(folder / "pipe")
    os.mkfifo(pipe)
    used = int(re.search(r"VmSize:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    limit = used * 1024 + _ROOM_BYTES
    for name in forged(folder / checkpoint_name(12), pipe):
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        print(name, flush=True)
        signal.alarm(_LIMIT_SECONDS)
        try:
            wrong = try_one(folder / checkpoint_name(12))
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        signal.alarm(0)
        no_limit = resource.RLIM_INFINITY, resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, no_limit)
        if wrong:
            print(f"WRONG {name}: {wrong}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
