"""Export of checkpoint values to other formats, and import, bit by bit."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

import hpcstrat as hs
from hpcstrat.checkpoint.exchange import read_safetensors
from hpcstrat.checkpoint.file.reader import map_values, open_checkpoint
from hpcstrat.cli.main import main

# All bit patterns of bfloat16, with NaN payloads.
ALL_BITS = np.arange(1 << 16, dtype=np.uint16)
VALUES = {
    "layers.0.weight": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "layers.0.half": ALL_BITS.view(ml_dtypes.bfloat16).reshape(4, -1),
    "bf16_scalar": np.array(1.5, ml_dtypes.bfloat16),
    "deep/group/double": np.array([np.nan, np.inf, -0.0, 5e-324]),
    "count": np.array(2**40 + 1),
    "flags": np.array([True, False, True]),
    "bytes": np.arange(7, dtype=np.uint8),
    "empty": np.zeros((0, 3), np.float32),
    "wave": np.array([1 + 2j], np.complex64),
    "float16": np.array([65504, 6e-8], np.float16),
}


def _run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, words)])


def _good(*words: Any) -> str:
    done = _run(*words)
    assert done.exit_code == 0, done.output
    return done.output


def _variables(values: dict[str, Any]) -> dict[str, Any]:
    return {name: hs.Variable(value, name=name) for name, value in values.items()}


class Model:
    """An object with variables, whose names have slashes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.variables = _variables(values)

    def checkpoint_variables(self) -> dict[str, hs.Variable]:
        return self.variables


def _save(folder: Path, **parts: Any) -> Path:
    objects = {
        name: _variables(values) if isinstance(values, dict) else values
        for name, values in parts.items()
    }
    with hs.CheckpointManager(folder, **objects) as manager:
        return Path(manager.save(1))


def _bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    own = np.asarray(value)
    return own.dtype.name, own.shape, own.tobytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return _save(tmp_path / "saved", model=Model(VALUES), other={"b": np.ones(2)})


ENDINGS = [
    ".npz",
    ".h5",
    ".safetensors",
    pytest.param(".pt", marks=pytest.mark.framework("torch")),
]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("words", [(), ("--part", "model")])
def test_a_round_trip_keeps_every_bit(
    saved: Path, tmp_path: Path, ending: str, words: tuple[str, ...]
) -> None:
    middle = tmp_path / f"middle{ending}"
    count = len(VALUES) + (not words)
    assert f": {count} values" in _good("export", saved, middle, *words)
    _good("import", middle, tmp_path / "again", "--step", 7, *words, "--like", saved)
    fresh = Model({k: np.zeros_like(v) for k, v in VALUES.items()})
    with hs.CheckpointManager(tmp_path / "again", model=fresh) as manager:
        assert manager.restore(only=["model"]) == 7
    for name, value in VALUES.items():
        assert _bits(fresh.variables[name].numpy()) == _bits(value), name
    done = _run("diff", saved, tmp_path / "again" / "ckpt-0000000007.h5")
    lines = [line for line in done.output.splitlines() if "only in" in line]
    assert len(lines) == len(words) // 2


def test_variables_of_a_dict_need_no_model(tmp_path: Path) -> None:
    values = {"w": np.arange(3.0), "b": np.ones(())}
    saved = _save(tmp_path / "a", net=values, rate={"x": np.ones(1)})
    _good("export", saved, tmp_path / "whole.npz")
    _good("export", saved, tmp_path / "net.npz", "--part", "net")
    _good("import", tmp_path / "whole.npz", tmp_path / "b")
    assert "no difference" in _good(
        "diff", saved, tmp_path / "b" / "ckpt-0000000000.h5"
    )
    words = ("--part", "variables/net", "--step", 1)
    _good("import", tmp_path / "net.npz", tmp_path / "b", *words)
    fresh = _variables({"w": np.zeros(3), "b": np.zeros(())})
    with hs.CheckpointManager(tmp_path / "b", net=fresh) as manager:
        assert manager.restore(only=["net"]) == 1
    assert fresh["w"].numpy().tolist() == [0, 1, 2]


def test_libraries_read_what_was_exported(saved: Path, tmp_path: Path) -> None:
    numpy_file, plain = tmp_path / "x.npz", tmp_path / "x.h5"
    _good("export", saved, numpy_file, "--part", "model")
    _good("export", saved, plain, "--part", "model")
    with np.load(numpy_file) as found:
        assert _bits(found["layers.0.weight"]) == _bits(VALUES["layers.0.weight"])
    with h5py.File(plain) as found:
        half = found["layers.0.half"]
        assert half.dtype == np.float32
        finite = ~np.isnan(VALUES["layers.0.half"].astype(np.float32))
        expected = VALUES["layers.0.half"].astype(np.float32)
        assert np.array_equal(half[...][finite], expected[finite])
        assert found["deep/group/double"][3] == 5e-324


@pytest.mark.framework("safetensors")
def test_the_library_of_safetensors_reads_and_writes_the_same(
    saved: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    output, theirs = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    _good("export", saved, output, "--part", "model")
    found = load_file(output)
    assert {name: _bits(value) for name, value in found.items()} == {
        name: _bits(value) for name, value in VALUES.items()
    }
    save_file(VALUES, theirs, metadata={"format": "np"})
    ours = read_safetensors(str(theirs))
    assert {name: _bits(value) for name, value in ours.items()} == {
        name: _bits(value) for name, value in VALUES.items()
    }


@pytest.mark.framework("torch")
def test_a_module_of_torch_goes_to_others_and_back(tmp_path: Path) -> None:
    import torch

    import hpcstrat.integrations.torch as hst

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model = model.to(torch.bfloat16)
    hst.replicate(model, hs.get_strategy())
    with hs.CheckpointManager(tmp_path / "a", **hst.state(model)) as manager:
        path = manager.save(1)
    for ending in (".pt", ".safetensors"):
        _good("export", path, tmp_path / f"x{ending}", "--part", "model")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    fresh.to(torch.bfloat16).load_state_dict(found)
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    # Import from a torch file, whose weights are in a nested dict, into another model.
    torch.save({"net": model.state_dict(), "epoch": 3}, tmp_path / "theirs.pt")
    words = ("--part", "model", "--take", "net/", "--like", path)
    _good("import", tmp_path / "theirs.pt", tmp_path / "b", *words)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    other = hst.replicate(other.to(torch.bfloat16), hs.get_strategy())
    with hs.CheckpointManager(tmp_path / "b", **hst.state(other)) as manager:
        manager.restore(only=["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.framework("torch")
@pytest.mark.framework("keras")
@pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")
@pytest.mark.parametrize("ending", [".keras", ".weights.h5"])
def test_a_model_of_keras_goes_to_files_and_back(tmp_path: Path, ending: str) -> None:
    import keras

    import hpcstrat.integrations.keras as hsk

    def made() -> Any:
        layers = [
            keras.layers.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
        return hsk.distribute(model, hs.get_strategy())

    model = made()
    with hs.CheckpointManager(tmp_path / "a", **hsk.state(model)) as manager:
        path = manager.save(1)
    layers, output = tmp_path / "layers.json", tmp_path / f"x{ending}"
    layers.write_text(model.to_json())
    assert "expected the layers" in _run("export", path, output).output
    _good("export", path, output, "--model", layers)
    fresh = made()
    if ending == ".keras":
        fresh = keras.models.load_model(output, compile=False)
    else:
        fresh.load_weights(output)
    for one, other in zip(model.get_weights(), fresh.get_weights(), strict=True):
        assert _bits(one) == _bits(other)
    words = ["--part", "model", "--like", path]
    if ending == ".weights.h5":
        words += ["--model", str(layers)]
    _good("import", output, tmp_path / "b", *words)
    third = made()
    with hs.CheckpointManager(tmp_path / "b", **hsk.state(third)) as manager:
        manager.restore(only=["model"])
    for one, other in zip(model.get_weights(), third.get_weights(), strict=True):
        assert _bits(one) == _bits(other)
    wrong = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(5)])
    layers.write_text(wrong.to_json())
    (tmp_path / "y").mkdir()
    done = _run("export", path, tmp_path / "y" / f"y{ending}", "--model", layers)
    assert "0/kernel of [3, 4] for [3, 5]" in done.output
    assert "unknown" in done.output
    assert not list((tmp_path / "y").iterdir())


@pytest.mark.parametrize("ending", ENDINGS)
def test_files_need_not_fit_in_memory(tmp_path: Path, ending: str) -> None:
    many, size = 8, 8 << 20
    values = {f"v{i}": np.full(size // 8, i, np.float64) for i in range(many)}
    saved, output = _save(tmp_path / "a", net=values), tmp_path / f"x{ending}"
    del values
    # Export once before, because imported modules keep memory.
    _good("export", saved, tmp_path / f"first{ending}")
    tracemalloc.start()
    try:
        _good("export", saved, output)
        _good("import", output, tmp_path / "b", "--like", saved)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # NumPy's write buffer has 16 MiB.
    assert peak < many * size * 0.55
    assert "no difference" in _good(
        "diff", saved, tmp_path / "b" / "ckpt-0000000000.h5"
    )


def _npz(path: Path, **values: Any) -> Path:
    np.savez(path, **values)
    return path


Wrong = Callable[[Path], tuple[Any, ...]]
WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "missing": ({"w": np.ones(3)}, (), "missing: variables/net/b (give --partial"),
    "extra": (
        {"w": np.ones(3), "b": np.ones(()), "c": np.ones(1)},
        (),
        "does not have: variables/net/c",
    ),
    "shape": (
        {"w": np.ones((3, 1)), "b": np.ones(())},
        (),
        "other shapes: variables/net/w [3, 1] for [3]",
    ),
    "type": (
        {"w": np.ones(3, np.float32), "b": np.ones(())},
        (),
        "other types: variables/net/w float32 for float64 (give --cast)",
    ),
    "shape, though partial": ({"w": np.ones(2)}, ("--partial",), "[2] for [3]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_the_model_is_named(tmp_path: Path, case: str) -> None:
    values, words, expected = WRONG[case]
    like = _save(tmp_path / "a", net={"w": np.zeros(3), "b": np.zeros(())})
    source = _npz(tmp_path / "x.npz", **values)
    words = ("--part", "net", "--like", str(like), *words)
    done = _run("import", source, tmp_path / "b", *words)
    assert done.exit_code == 1
    assert expected in " ".join(done.output.split())
    assert not (tmp_path / "b").exists()


def test_cast_and_partial_take_what_there_is(tmp_path: Path) -> None:
    like = _save(tmp_path / "a", net={"w": np.zeros(3), "b": np.full((), 5.0)})
    source = _npz(tmp_path / "x.npz", w=np.ones(3, np.float32), c=np.ones(1))
    words = ("--part", "net", "--like", like, "--cast", "--partial")
    _good("import", source, tmp_path / "b", *words)
    fresh = _variables({"w": np.zeros(3), "b": np.zeros(())})
    with hs.CheckpointManager(tmp_path / "b", net=fresh) as manager:
        manager.restore()
    assert fresh["w"].numpy().tolist() == [1, 1, 1]
    assert fresh["b"].numpy() == 5


def test_compressed_and_foreign_order_files_are_read(tmp_path: Path) -> None:
    values = {"w": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "n": np.arange(3)}
    np.savez_compressed(tmp_path / "x.npz", **values)
    np.savez(tmp_path / "f.npz", **values)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("w", data=values["w"], compression="gzip")
        file.create_dataset("n", data=values["n"].astype(">i4"))
    for name in ("x.npz", "f.npz", "x.h5"):
        folder = tmp_path / f"to {name}"
        _good("import", tmp_path / name, folder, "--part", "variables/net")
        fresh = _variables({"w": np.zeros((2, 3)), "n": np.zeros(3, np.int64)})
        with hs.CheckpointManager(folder, net=fresh) as manager:
            manager.restore(allow_cast=True)
        assert fresh["w"].numpy().tolist() == values["w"].tolist()
        assert fresh["n"].numpy().tolist() == [0, 1, 2]


def test_what_is_no_file_of_its_format_is_said(tmp_path: Path) -> None:
    for ending in (".npz", ".h5", ".safetensors"):
        source = tmp_path / f"x{ending}"
        source.write_bytes(b"nothing of the kind, but longer than a header")
        done = _run("import", source, tmp_path / "b", "--part", "net")
        assert done.exit_code == 1
        assert "which cannot be read" in done.output
    whole = tmp_path / "whole.safetensors"
    saved = _save(tmp_path / "a", net={"w": np.zeros(300)})
    _good("export", saved, whole)
    whole.write_bytes(whole.read_bytes()[:-8])
    assert "do not fit" in _run("import", whole, tmp_path / "b").output


def test_names_without_an_object_ask_for_one(tmp_path: Path) -> None:
    source = _npz(tmp_path / "x.npz", w=np.ones(3))
    assert "expected --part" in _run("import", source, tmp_path / "b").output
    done = _run("import", source, tmp_path / "b", "--part", "n", "--take", "layers.")
    assert "expected names that begin with layers., found w" in done.output
    saved = _save(tmp_path / "a", net={"w": np.zeros(3)})
    done = _run("export", saved, tmp_path / "y.npz", "--part", "model")
    assert "begin with model/, found variables/net/w" in " ".join(done.output.split())
    assert not (tmp_path / "y.npz").exists()


def test_an_option_chooses_the_format_of_any_name(tmp_path: Path) -> None:
    saved = _save(tmp_path / "a", net={"w": np.arange(3.0)})
    output = tmp_path / "weights"
    assert "expected a file that ends in" in _run("export", saved, output).output
    done = _run("export", saved, output, "--to", "keras")
    assert "expected a file that ends in .keras, .weights.h5" in done.output
    _good("export", saved, output, "--to", "safetensors")
    assert list(read_safetensors(str(output))) == ["variables/net/w"]
    _good("import", output, tmp_path / "b", "--from", "safetensors")
    assert "no difference" in _good("diff", saved, tmp_path / "b/ckpt-0000000000.h5")


def test_types_that_a_format_lacks_are_named(tmp_path: Path) -> None:
    saved = _save(tmp_path / "a", net={"w": np.zeros(3, np.complex128)})
    output = tmp_path / "x.safetensors"
    done = _run("export", saved, output)
    assert "'variables/net/w' of complex128" in " ".join(done.output.split())
    assert not output.exists()


def _refused(source: Path, folder: Path) -> str:
    done = _run("import", source, folder, "--part", "net")
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    [line] = done.output.strip().splitlines()
    assert not list(folder.glob("*"))
    return line


def test_values_under_a_second_name_are_imported_under_both(tmp_path: Path) -> None:
    source = tmp_path / "x.h5"
    with h5py.File(source, "w") as file:
        file["w"], file["group/v"] = np.arange(3.0), np.arange(2)
        file["again"] = file["w"]
        file["soft"] = h5py.SoftLink("/group/v")
        file["whole"] = h5py.SoftLink("group")
        file["group/up"] = h5py.SoftLink("/w")
    _good("import", source, tmp_path / "b", "--part", "net")
    found = map_values(open_checkpoint(str(tmp_path / "b/ckpt-0000000000.h5")))
    names = {"w": 3.0, "again": 3.0, "group/up": 3.0, "whole/up": 3.0}
    assert found.keys() == {
        f"net/{name}" for name in [*names, "group/v", "soft", "whole/v"]
    }
    for name in names:
        assert found[f"net/{name}"].tolist() == [0, 1, 2]
    for name in ("group/v", "soft", "whole/v"):
        assert found[f"net/{name}"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("external", "the values of n are in another file"),
        ("virtual", "the values of n are in another file"),
        ("link", "n is a link to another file"),
        ("through", "n is a link to another file"),
        ("cycle", "n contains itself"),
        ("nothing", "n is a link to nothing"),
        ("huge", "n is said to have 8,796,093,022,208 bytes, but the file has 0"),
        ("many", "it has more than 10,000 links to other names"),
    ],
)
def test_hdf5_files_with_parts_elsewhere_are_refused(
    kind: str, words: str, tmp_path: Path
) -> None:
    source, other = tmp_path / "x.h5", tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["group/secret"] = np.arange(5.0)
    with h5py.File(source, "w") as file:
        file["w"] = np.ones(2)
        match kind:
            case "external":
                file.create_dataset("n", (3,), "f8", external=[(str(other), 0, 24)])
            case "virtual":
                layout = h5py.VirtualLayout((5,), "f8")
                layout[:] = h5py.VirtualSource(str(other), "group/secret", (5,))
                file.create_virtual_dataset("n", layout)
            case "link":
                file["n"] = h5py.ExternalLink(str(other), "/group/secret")
            case "through":
                file["n"] = h5py.ExternalLink(str(other), "/group")
                file["a"] = h5py.SoftLink("/n/secret")
            case "cycle":
                file["n/up"] = h5py.SoftLink("/n")
            case "nothing":
                file["n"] = h5py.SoftLink("/missing")
            case "huge":
                file.create_dataset("n", (1 << 40,), "f8", chunks=(1 << 20,))
            case "many":
                file.create_group("g0")["w"] = np.ones(1)
                for number in range(1, 40):
                    group = file.create_group(f"g{number}")
                    group["a"] = group["b"] = file[f"g{number - 1}"]
    line = _refused(source, tmp_path / "b")
    assert words in line.replace("n/up", "n")


def test_numbers_that_hdf5_stores_in_fewer_bits_are_converted(tmp_path: Path) -> None:
    source, numbers = tmp_path / "x.h5", np.array([-5, 2000, 0, 7], np.int16)
    with h5py.File(source, "w") as file:
        kind = h5py.h5t.STD_I16LE.copy()
        kind.set_precision(12)
        kind.set_offset(4)
        space = h5py.h5s.create_simple(numbers.shape)
        made = h5py.h5d.create(file.id, b"n", kind, space)
        made.write(space, space, numbers)
    _good("import", source, tmp_path / "b", "--part", "net")
    found = map_values(open_checkpoint(str(tmp_path / "b/ckpt-0000000000.h5")))
    assert found["net/n"].tolist() == numbers.tolist()


def _safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "is no object of JSON"),
        ("[" * 100_000, "RecursionError"),
        ({"w": 3}, "by something else than a dict"),
        ({"w": {"dtype": "U8", "shape": [8]}}, "data_offsets"),
        ({"w": {"dtype": "F9", "shape": [8], "data_offsets": [0, 8]}}, "'F9'"),
        ({"w": {"dtype": "U8", "shape": [8.0], "data_offsets": [0, 8]}}, "is no count"),
        ({"w": {"dtype": "U8", "shape": [1e999], "data_offsets": [0, 8]}}, "no count"),
        ({"w": {"dtype": "U8", "shape": [1 << 70], "data_offsets": [0, 8]}}, "not fit"),
        ({"w": {"dtype": "U8", "shape": [6], "data_offsets": [2, 8]}}, "not fit"),
        (
            '{"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},'
            ' "w": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}}',
            "['w'] twice",
        ),
        (
            {
                name: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
                for name in "ab"
            },
            "do not fit",
        ),
        (
            {"a/../b": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}},
            "'a/../b' has an empty part",
        ),
        (
            {
                "a/b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
            },
            "'a' is a value, and 'a/b' is in it",
        ),
    ],
)
def test_damaged_headers_of_safetensors_are_one_line(
    header: Any, words: str, tmp_path: Path
) -> None:
    source = _safetensors(tmp_path / "x.safetensors", header, bytes(8))
    assert words in _refused(source, tmp_path / "b")


def test_npz_files_that_lie_about_their_members_are_refused(tmp_path: Path) -> None:
    def member(shape: tuple[int, ...], data: bytes) -> bytes:
        stream = io.BytesIO()
        about = {"descr": "<f8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, about)
        return stream.getvalue() + data

    cases = {
        "short": ([("w.npy", member((9,), bytes(16)))], "has 16 bytes, not the 72"),
        "huge": ([("w.npy", member((1 << 40,), bytes(16)))], "not the 8,796,093,022"),
        "negative": ([("w.npy", member((-2, -1), bytes(16)))], "or no array"),
        "twice": (
            [("w.npy", member((2,), bytes(16))), ("w", member((2,), bytes(16)))],
            "two values named 'w'",
        ),
    }
    for name, (members, words) in cases.items():
        for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            source = tmp_path / f"{name}.npz"
            with zipfile.ZipFile(source, "w", compression) as archive:
                for path, data in members:
                    archive.writestr(path, data)
            assert words in _refused(source, tmp_path / "b")
    damaged = _npz(tmp_path / "damaged.npz", w=np.arange(300.0))
    data = bytearray(damaged.read_bytes())
    data[data.index(np.float64(200).tobytes())] ^= 1
    damaged.write_bytes(data)
    assert "Bad CRC-32" in _refused(damaged, tmp_path / "b")


def test_a_pipe_and_a_huge_step_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npz")
    assert "a pipe or a device" in _refused(tmp_path / "x.npz", tmp_path / "b")
    source = _npz(tmp_path / "y.npz", w=np.ones(3))
    words = "import", source, tmp_path / "b", "--part", "net", "--step"
    done = _run(*words, 10**18)
    assert isinstance(done.exception, SystemExit)
    assert "is not in the range" in done.output
    _good(*words, 10**18 - 1)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("npz", 40), ("h5", 40), ("safetensors", 40), ("links", 40), ("headers", 40)],
)
def test_damaged_files_are_imported_exactly_or_refused(
    kind: str, count: int, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "tests.faults.foreign", kind, "0", str(count)]
    done = subprocess.run(
        [*words, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done, (tmp_path / "case").read_text())
    [line] = done.stdout.splitlines()
    imports, errors = (int(part.split()[0]) for part in line.split(", "))
    assert imports + errors == count
    assert imports > 0
