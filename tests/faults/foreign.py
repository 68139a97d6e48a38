"""Import damaged files of other programs: ``foreign.py KIND FIRST COUNT FOLDER``.

Each case is determined by its number. The number is written to ``FOLDER/case`` before
the case begins, so that the parent knows a case that crashed this process or hung. A
case must end with one line of an error, or with a checkpoint that has exactly the
values that the format's own library reads. The program prints a line for each case that
does not, and at the end the numbers of imports and errors. The kinds are ``npz``,
``h5``, ``safetensors`` (some bytes are changed, inserted or cut), ``links`` (HDF5 files
with random links) and ``headers`` (headers of safetensors with changed entries).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from click.testing import CliRunner

from hpcstrat.checkpoint.file.reader import map_values, open_checkpoint
from hpcstrat.cli.main import main as command

_LIMIT_SECONDS = 20
_SHAPES = [(), (3,), (2, 3), (0, 4), (40, 7)]
_TYPES = ["f4", "f8", "i4", "i8", "u1", "?", "f2", "c8"]
_ODD = [
    -1,
    0,
    1,
    1.5,
    7,
    8,
    1 << 31,
    1 << 40,
    1 << 63,
    10**30,
    1e400,
    None,
    "8",
    [],
    {},
]
_NAMES = ["", "a/../b", "..", "\ud800", "x/y", "a/z"]
_Values = dict[str, np.ndarray]


def _values(rng: np.random.Generator) -> _Values:
    names = ["a", "b/c", "b/d", "deep/er/e"][: rng.integers(1, 5)]
    found = {}
    for name in names:
        shape = _SHAPES[rng.integers(len(_SHAPES))]
        kind = np.dtype(_TYPES[rng.integers(len(_TYPES))])
        found[name] = np.asarray(rng.random(shape) * 100, kind)
    return found


def _write_h5(path: Path, values: _Values, rng: np.random.Generator) -> None:
    with h5py.File(path, "w", userblock_size=512 * int(rng.integers(2))) as file:
        for name, value in values.items():
            more: dict[str, Any] = {}
            if value.size and value.ndim and rng.integers(2):
                more = {"compression": "gzip", "fletcher32": bool(rng.integers(2))}
            file.create_dataset(name, data=value, **more)


def _write_safetensors(path: Path, values: _Values, rng: np.random.Generator) -> None:
    from safetensors.numpy import save_file

    save_file(values, path)


def _write_npz(path: Path, values: _Values, rng: np.random.Generator) -> None:
    (np.savez, np.savez_compressed)[rng.integers(2)](path, **values)


def _read_npz(path: Path) -> _Values:
    with np.load(path) as file:
        return {name: file[name] for name in file}


def _read_h5(path: Path) -> _Values:
    found: _Values = {}

    def add(group: h5py.Group, prefix: str) -> None:
        for name in group:
            item = group[name]
            if isinstance(item, h5py.Group):
                add(item, f"{prefix}{name}/")
            elif isinstance(item, h5py.Dataset):
                found[f"{prefix}{name}"] = item[()]

    with h5py.File(path) as file:
        add(file, "")
    return found


def _read_safetensors(path: Path) -> _Values:
    from safetensors.numpy import load_file

    return dict(load_file(path))


_FORMATS: dict[str, tuple[Callable[..., None], Callable[[Path], _Values]]] = {
    "npz": (_write_npz, _read_npz),
    "h5": (_write_h5, _read_h5),
    "safetensors": (_write_safetensors, _read_safetensors),
}


def _damage(path: Path, rng: np.random.Generator) -> None:
    """Change, insert or cut some bytes of a file."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.integers(1, 4)):
        at, count = int(rng.integers(len(data))), int(rng.integers(1, 9))
        match rng.integers(5):
            case 0:
                data[at : at + count] = rng.bytes(count)
            case 1:
                data[at] ^= 1 << int(rng.integers(8))
            case 2:
                del data[at : at + count]
            case 3:
                data[at:at] = rng.bytes(count)
            case 4 if len(data) > 64:
                del data[max(32, at) :]
    path.write_bytes(data)


def _change_header(path: Path, rng: np.random.Generator) -> None:
    """Change an entry in the header of a safetensors file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = sorted(header)[rng.integers(len(header))]
    about, odd = header[name], _ODD[rng.integers(len(_ODD))]
    shape, offsets = about["shape"], about["data_offsets"]
    key = ["shape", "dtype", "data_offsets"][rng.integers(3)]
    changes: list[Callable[[], Any]] = [
        lambda: about.update({key: odd}),
        lambda: shape.append(odd),
        lambda: offsets.__setitem__(rng.integers(2), odd),
        lambda: about.update(dtype="F8_E4M3"),
        lambda: about.pop(key),
        lambda: header.update({name: odd}),
        lambda: header.update({_NAMES[rng.integers(len(_NAMES))]: about}),
        lambda: header.update(__metadata__={"format": "np"}),
        lambda: header.update(renamed=header.pop(name)),
    ]
    changes[rng.integers(len(changes))]()
    text = json.dumps(header)
    if rng.integers(4) == 0:
        text = text[:-1] + "," + text[1:]
    if rng.integers(8) == 0:
        text = ["[" * 100_000, "[]", "3", "null"][rng.integers(4)]
    raw = text.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[end:])


def _add_links(path: Path, rng: np.random.Generator) -> None:
    """Add links and unusual datasets to an HDF5 file."""
    other = path.with_name("other.h5")
    with h5py.File(other, "w") as file:
        file["secret"] = np.arange(5.0)
    with h5py.File(path, "a") as file:
        items = list[str]()
        file.visit(items.append)
        for number in range(rng.integers(1, 3)):
            target, name = items[rng.integers(len(items))], f"n{number}"
            match rng.integers(14):
                case 0 | 1 | 10 | 11:
                    file[name] = file[target]
                case 2 | 3 | 12 | 13:
                    file[name] = h5py.SoftLink(target)
                case 4:
                    file[name] = h5py.SoftLink(f"n{rng.integers(3)}")
                case 5:
                    file[name] = h5py.ExternalLink(str(other), "/secret")
                case 6:
                    outside = [(str(other), 0, 24)]
                    file.create_dataset(name, (3,), "f8", external=outside)
                case 7:
                    layout = h5py.VirtualLayout((5,), "f8")
                    layout[:] = h5py.VirtualSource(str(other), "secret", (5,))
                    file.create_virtual_dataset(name, layout)
                case 8:
                    file.create_dataset(name, (1 << 40,), "f8", chunks=(1 << 20,))
                case 9:
                    kind = h5py.h5t.STD_I16LE.copy()
                    kind.set_precision(12)
                    kind.set_offset(4 * int(rng.integers(2)))
                    space = h5py.h5s.create_simple((4,))
                    made = h5py.h5d.create(file.id, name.encode(), kind, space)
                    made.write(space, space, np.array([-5, 2000, 0, 7], np.int16))
            items.append(name)


def _holds_other_file(path: Path) -> bool:
    """Return whether an HDF5 file has links or values in another file, or cycles."""
    found = False

    def look(group: h5py.Group, depth: int) -> None:
        nonlocal found
        if depth > 8:
            found = True
            return
        for name in group:
            link = group.get(name, getlink=True)
            item = None
            with contextlib.suppress(LookupError, RuntimeError):
                item = group[name]
            if isinstance(link, h5py.ExternalLink) or item is None:
                found = True
            elif isinstance(item, h5py.Group):
                look(item, depth + 1)
            elif item.external or item.is_virtual or item.nbytes > 1 << 30:
                found = True

    with h5py.File(path) as file:
        look(file, 0)
    return found


def _problem(kind: str, path: Path, folder: Path) -> Iterator[str]:
    """Import a file; yield faults, and at last ``import`` or ``error``."""
    words = ["ckpt", "import", str(path), str(folder), "--part", "net"]
    done = CliRunner().invoke(command, words)
    crashed = done.exception is not None and not isinstance(done.exception, SystemExit)
    lines = done.output.strip().splitlines()
    if crashed:
        yield f"traceback: {done.exception!r}"
    elif done.exit_code and (len(lines) != 1 or not lines[0].startswith("Error: ")):
        yield f"not one line: {done.output!r}"
    if done.exit_code:
        if kind == "links" and not _holds_other_file(path):
            yield f"refused without a reason: {lines}"
        yield "error"
        return
    known = _FORMATS[{"links": "h5", "headers": "safetensors"}.get(kind, kind)][1]
    if kind == "links" and _holds_other_file(path):
        yield "values of another file"
        return
    [made] = folder.glob("ckpt-*.h5")
    mapped = map_values(open_checkpoint(str(made))).items()
    own = {name.removeprefix("net/"): value for name, value in mapped}
    try:
        expected = known(path)
    except Exception as error:
        yield f"the library reads nothing: {error!r}"
        return
    if own.keys() != expected.keys():
        yield f"names {sorted(own)} for {sorted(expected)}"
    for name in own.keys() & expected.keys():
        value, right = own[name], np.asarray(expected[name])
        right = right.astype(right.dtype.newbyteorder("="))
        same = value.dtype == right.dtype and value.shape == right.shape
        if not same or value.tobytes() != right.tobytes():
            yield f"{name} is {value.dtype}{value.shape}, {right.dtype}{right.shape}"
    yield "import"


def main(kind: str, first: str, count: str, folder: str) -> None:
    """Run the cases from ``first`` on."""
    warnings.simplefilter("ignore")
    ended = {"import": 0, "error": 0}
    ending = {"links": "h5", "headers": "safetensors"}.get(kind, kind)
    for number in range(int(first), int(first) + int(count)):
        rng = np.random.default_rng(number)
        case = Path(folder) / "files"
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        (Path(folder) / "case").write_text(str(number))
        path = case / f"x.{ending}"
        _FORMATS[ending][0](path, _values(rng), rng)
        change = {"links": _add_links, "headers": _change_header}.get(kind, _damage)
        change(path, rng)
        signal.alarm(_LIMIT_SECONDS)
        for found in _problem(kind, path, case / "made"):
            if found in ended:
                ended[found] += 1
            else:
                print(f"{kind} {number}: {found}", flush=True)
        signal.alarm(0)
    print(f"{ended['import']} imports, {ended['error']} errors")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
