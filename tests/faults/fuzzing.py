"""Open and restore damaged checkpoints: ``fuzzing.py KIND FIRST COUNT FOLDER``.

Each case is determined by its number. The number is written to ``FOLDER/case`` before
the case begins, so that the parent knows a case that crashed this process or hung. The
program prints a line for each error. The kinds are:

``damaged``: bytes before the data, or in the record, are changed, inserted or cut.
``forged``: bytes of the structures are changed, and the hashes are recomputed.
``index``: rows of the index are changed, and the hashes are recomputed.
``record``: numbers of the record are changed, and its hash is recomputed.
``version_1``: a file of format version 1, which has no hashes.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash

import hpcstrat as hs
from hpcstrat.checkpoint.file.reader import check, open_checkpoint, read_values
from hpcstrat.checkpoint.file.schema import named_dtype
from hpcstrat.errors import CheckpointError

VERSION_1 = Path(__file__).parents[1] / "old_files" / "version-1.h5"
RECORD_BYTES = 4096
# Struct of the record's numbers, and of the prefix's hash.
NUMBERS, ROOT = struct.Struct("<8Q"), slice(80, 96)
_LIMIT_SECONDS = 20
_ODD = (0, 1, 7, 8, 4095, 4096, 1 << 20, 1 << 31, 1 << 32, 1 << 47, 1 << 63, 2**64 - 1)


class State:
    """Plain state that a program saves."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def make_objects(value: float) -> dict[str, Any]:
    """Return one object of each kind that checkpoints contain."""
    strategy = hs.get_strategy()
    sums = {"synchronization": "on_read", "aggregation": "sum"}
    rows = {"synchronization": "on_read", "aggregation": "none"}
    data = hs.Dataset(np.arange(10), 4, shuffle=True, seed=3)
    return {
        "net": {
            "w": hs.Variable(np.full((3, 5), value)),
            "half": hs.Variable(np.full(7, value, np.float16)),
            "flags": [hs.Variable(bool(value)), hs.Variable(np.full((0, 3), value))],
            "large": hs.Variable(np.full(600, value, np.complex64)),
        },
        "seen": hs.Variable(np.int64(value), **sums),
        "own": hs.Variable(np.full(3, value), **rows),
        "counter": State({"value": value}),
        "noise": strategy.random("noise", seed=3),
        "data": strategy.experimental_distribute_dataset(data),
    }


def values_of(objects: dict[str, Any]) -> dict[str, bytes]:
    """Return the values that a restore changes, as bytes."""
    net = objects["net"]
    parts = [net["w"], net["half"], *net["flags"], net["large"]]
    parts += [objects["seen"], objects["own"]]
    found = {str(k): part.component.tobytes() for k, part in enumerate(parts)}
    found["counter"] = repr(objects["counter"].state).encode()
    found["data"] = repr(objects["data"].state()).encode()
    found["noise"] = repr(objects["noise"].generator.normal(size=3).tolist()).encode()
    return found


def change(data: bytearray, draw: np.random.Generator, start: int, stop: int) -> None:
    """Change bytes between two offsets in a random way; the length may change."""
    place = int(draw.integers(start, stop))
    length = min(int(2 ** draw.uniform(0, 10)), stop - place)
    other = int(draw.integers(start, stop - length + 1))
    here, there = slice(place, place + length), slice(other, other + length)
    word = slice(place, min(place + int(draw.choice([2, 4, 8])), stop))
    kind = int(draw.integers(9))
    if kind == 0:
        data[place] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        data[place] = int(draw.integers(256))
    elif kind == 2:
        odd = struct.pack("<Q", int(draw.choice(np.array(_ODD, np.uint64))))
        data[word] = odd[: word.stop - word.start]
    elif kind == 3:
        data[here] = draw.bytes(length)
    elif kind == 4:
        data[here] = bytes([int(draw.choice([0, 255]))]) * length
    elif kind == 5:
        data[here], data[there] = data[there], data[here]
    elif kind == 6:
        data[here] = data[there]
    elif kind == 7:
        data[place:place] = draw.bytes(length)
    else:
        del data[here]


def seal(data: bytearray, root: bool) -> None:
    """Recompute the hashes: optionally that of the prefix, then that of the record."""
    record = len(data) - RECORD_BYTES
    if root:
        (start,) = struct.unpack_from("<Q", data, record + 48)
        digest = xxhash.xxh3_128_digest(bytes(data[:start]))
        data[record + ROOT.start : record + ROOT.stop] = digest
    own = xxhash.xxh3_64_intdigest(bytes(data[record:-8]))
    data[-8:] = struct.pack("<Q", own)


class Fuzzer:
    """Generates and tries the cases of one kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._path = folder / "ckpt-0000000012.h5"
        made = folder / "whole"
        self.content = VERSION_1.read_bytes()
        self._wanted: dict[str, bytes] = {}
        if kind != "version_1":
            objects = make_objects(1.0)
            objects["noise"].generator.normal(size=5)
            next(iter(objects["data"]))
            path = hs.CheckpointManager(made, **objects).save(12, overwrite=True)
            self.content = Path(path).read_bytes()
            self._wanted = values_of(objects)
            with h5py.File(path) as file:
                index = file["hpcstrat/index"]
                start = index.id.get_offset()
                self._index = slice(start, start + index.nbytes)
            if self._restored(Path(path)) != self._wanted:
                raise AssertionError("the whole file came back with other values")
        record = self.content[-RECORD_BYTES:]
        _, _, _, self._table, self._start, *_ = NUMBERS.unpack_from(record, 16)

    def _restored(self, path: Path) -> dict[str, bytes]:
        objects = make_objects(7.0)
        manager = hs.CheckpointManager(path.parent, **objects)
        manager.restore(path)
        return values_of(objects)

    def _changed(self, number: int) -> bytes:
        kinds = ("damaged", "forged", "record", "version_1", "index")
        draw = np.random.default_rng([kinds.index(self._kind), number])
        data, size = bytearray(self.content), len(self.content)
        more = int(draw.integers(1, 4))
        if self._kind == "version_1":
            for _ in range(more):
                change(data, draw, 0, len(data))
            return bytes(data)
        if self._kind == "index":
            self._reindex(data, draw)
            return bytes(data)
        if self._kind == "record":
            self._renumber(data, draw)
            return bytes(data)
        for _ in range(more):
            # Change the record more often than its size suggests, because each number
            # counts.
            record = self._kind == "damaged" and draw.random() < 0.3
            if record and len(data) > RECORD_BYTES:
                change(data, draw, len(data) - RECORD_BYTES, len(data))
            else:
                stop = self._table if self._kind == "forged" else self._start
                change(data, draw, 0, min(stop, len(data)))
                if self._kind == "forged":
                    # Restore the bytes after the structures, which insertions and cuts
                    # have moved.
                    data[self._table :] = self.content[self._table :]
                    data.extend(bytes(size - len(data)))
        if self._kind == "forged":
            seal(data, True)
        return bytes(data)

    def _reindex(self, data: bytearray, draw: np.random.Generator) -> None:
        rows: Any = json.loads(data[self._index])
        for _ in range(int(draw.integers(1, 4))):
            kind, at = int(draw.integers(6)), int(draw.integers(len(rows)))
            if kind == 0:
                del rows[at]
            elif kind == 1:
                rows.append(rows[at])
            elif kind == 2:
                rows[at] = draw.choice(np.array([None, 1, "x", -1.5], object))
            elif isinstance(rows[at], list):
                row, column = rows[at], int(draw.integers(len(rows[at])))
                values = [None, "", "float32", "V8", "f4,(", "replica", [], [3]]
                values += [[2**40] * 2]
                values += [{}, True, -1, 1.5, "größe", "python/counter", *_ODD]
                other = values[int(draw.integers(len(values)))]
                if kind == 3 and isinstance(row[column], int):
                    other = row[column] + int(draw.integers(-64, 65))
                row[column] = other
        length = self._index.stop - self._index.start
        data[self._index] = json.dumps(rows).encode().ljust(length)[:length]
        if draw.random() < 0.1:
            place = self._index.start + int(draw.integers(length))
            data[place : self._index.stop] = b"[" * (self._index.stop - place)
        seal(data, True)

    def _renumber(self, data: bytearray, draw: np.random.Generator) -> None:
        record = len(data) - RECORD_BYTES
        numbers = list(NUMBERS.unpack_from(data, record + 16))
        for _ in range(int(draw.integers(1, 3))):
            index = int(draw.integers(len(numbers)))
            near = max(0, numbers[index] + 4096 * int(draw.integers(-2, 3)))
            odd = int(draw.choice(np.array(_ODD, np.uint64)))
            numbers[index] = min(int(draw.choice([near, odd])), 2**64 - 1)
        NUMBERS.pack_into(data, record + 16, *numbers)
        # The record may now describe another prefix, whose hash is right in half of the
        # cases.
        seal(data, bool(draw.integers(2)))

    def try_one(self, number: int) -> str:
        """Try one case; return a description of an error, or an empty text."""
        data, path = self._changed(number), str(self._path)
        self._path.write_bytes(data)
        same = data == self.content
        refused = _refused(lambda: check(path)), _refused(lambda: open_checkpoint(path))
        if self._kind == "damaged" and refused != (not same, not same):
            return f"check and open refused {refused}, the same bytes: {same}"
        if any(refused):
            return ""
        found: list[dict[str, bytes]] = []
        if self._kind == "version_1":
            _refused(lambda: self._read_values(path))
            return ""
        changed = _refused(lambda: found.append(self._restored(self._path)))
        if same and (changed or found[0] != self._wanted):
            return "the whole file came back with other values"
        return ""

    def _read_values(self, path: str) -> None:
        """Read the values that match the entries of the original file."""
        entries = open_checkpoint(path).header.entries
        known = open_checkpoint(str(VERSION_1)).header.entries
        fit = [name for name, entry in entries.items() if known.get(name) == entry]
        read_values(path, {name: named_dtype(known[name].dtype) for name in fit})


def _refused(action: Callable[[], Any]) -> bool:
    try:
        action()
    except CheckpointError:
        return True
    return False


def main() -> None:
    """Try cases, and print errors."""
    kind, first, count, folder = sys.argv[1:]
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    fuzzer = Fuzzer(kind, Path(folder))
    file = os.open(Path(folder) / "case", os.O_CREAT | os.O_WRONLY)
    for number in range(int(first), int(first) + int(count)):
        os.pwrite(file, f"{number:12d}".encode(), 0)
        signal.alarm(_LIMIT_SECONDS)
        try:
            wrong = fuzzer.try_one(number)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            print(f"{kind} case {number}: {wrong}", flush=True)
    signal.alarm(0)
    print("done", count, flush=True)


if __name__ == "__main__":
    main()
