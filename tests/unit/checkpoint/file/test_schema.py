"""A checkpoint is an ordinary HDF5 file, as docs/checkpoint-format.md specifies it."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.checkpoint import disk
from hpcstrat.checkpoint.file import reader, schema, skeleton
from hpcstrat.checkpoint.file.reader import open_checkpoint, read_header
from hpcstrat.checkpoint.file.schema import (
    FORMAT_VERSION,
    checkpoint_name,
    list_checkpoints,
    step_of,
)
from hpcstrat.checkpoint.keep import folder
from tests.folders import listed

TEXT, INT64, INT8 = "text", np.dtype("<i8"), np.dtype("i1")

ROOT_ATTRIBUTES = {
    "created_unix_ns": INT64,
    "hpcstrat_format": TEXT,
    "hpcstrat_format_version": INT64,
    "hpcstrat_version": TEXT,
    "job_id": TEXT,
    "num_replicas": INT64,
    "step": INT64,
}
DATASET_ATTRIBUTES = {
    "aggregation": TEXT,
    "dtype": TEXT,
    "synchronization": TEXT,
    "trainable": INT8,
}
TABLE_ATTRIBUTES = {
    "algorithm": TEXT,
    "block_bytes": INT64,
    "data_end": INT64,
    "data_start": INT64,
}
ITERATOR_ATTRIBUTES = {
    "epoch": INT64,
    "global_position": INT64,
    "num_rows": INT64,
    "order_digest": INT64,
    "order_version": INT64,
    "shuffle_seed": INT64,
}


class Counter:
    """An object with plain state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"größe": [1, 2.5, None], "text": "ü"}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _objects() -> dict[str, Any]:
    """Return one object of every kind that can be saved, in one process without MPI."""
    weights = hs.Variable(np.arange(6.0).reshape(2, 3), name="w")
    optimizer = hs.optimizers.SGD(0.5, momentum=0.5)
    optimizer.apply_gradients([(np.ones((2, 3)), weights)])
    data = hs.Dataset(np.arange(10), 4, shuffle=True, seed=3)
    return {
        "weights": weights,
        "net": {
            "flag": hs.Variable(True, trainable=False),
            "parts": [hs.Variable(np.array([1 + 2j], np.complex64))],
        },
        "empty": hs.Variable(np.zeros((0, 3), np.float16)),
        "scalar": hs.Variable(np.array(-7, ">i4")),
        "größe": hs.Variable(np.uint8([1, 2])),
        "optimizer": optimizer,
        "data": hs.get_strategy().experimental_distribute_dataset(data),
        "counter": Counter(),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of step 12 with objects of every kind."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return Path(hs.CheckpointManager(folder, **_objects()).save(12))


@pytest.fixture
def file(path: Path) -> Iterator[h5py.File]:
    """Return the checkpoint file, opened by h5py without hpcstrat."""
    with h5py.File(path, "r") as opened:
        yield opened


def _everything(file: h5py.File) -> dict[str, Any]:
    found: dict[str, Any] = {"/": file}
    file.visititems(found.__setitem__)
    return found


def _datasets(file: h5py.File) -> dict[str, h5py.Dataset]:
    everything = _everything(file)
    return {k: v for k, v in everything.items() if isinstance(v, h5py.Dataset)}


def _attribute_types(thing: Any) -> dict[str, Any]:
    """Return the stored type of each attribute; all attributes are scalars."""
    types: dict[str, Any] = {}
    for name in thing.attrs:
        attribute = thing.attrs.get_id(name)
        assert attribute.shape == (), name
        kind = attribute.get_type()
        if kind.get_class() == h5py.h5t.STRING:
            assert not kind.is_variable_str(), name
            assert kind.get_cset() == h5py.h5t.CSET_ASCII, name
            types[name] = TEXT
        else:
            types[name] = kind.dtype
    return types


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (0, "ckpt-0000000000.h5"),
        (1200, "ckpt-0000001200.h5"),
        (10**10, "ckpt-10000000000.h5"),
        (10**18 - 1, f"ckpt-{10**18 - 1}.h5"),
    ],
)
def test_name_holds_the_step(step: int, name: str) -> None:
    assert checkpoint_name(step) == name
    assert step_of(f"/some/where/{name}") == step


@pytest.mark.parametrize(
    "name",
    [
        ".ckpt-0000001200.h5.0.node-12.abcd",
        "ckpt-0000001200.h5.bad",
        "ckpt-.h5",
        "ckpt--000000001.h5",
        "ckpt-12.h5 ",
        "ckpt-12.hdf5",
        "xckpt-12.h5",
        f"ckpt-{10**18}.h5",
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert step_of(name) is None


def test_checkpoints_are_listed_by_step_not_by_name(tmp_path: Path) -> None:
    steps = [10**11, 3, 10**10, 20]
    names = [checkpoint_name(step) for step in steps]
    for name in [*names, ".ckpt-0000000001.h5.0.node-1.abcd", "notes.txt"]:
        (tmp_path / name).touch()
    found = [step_of(name) for name in list_checkpoints(str(tmp_path))]
    assert found == sorted(steps)
    assert list_checkpoints(str(tmp_path / "missing")) == []


def test_groups_are_those_of_the_specification(file: h5py.File) -> None:
    assert set(file) == {"variables", "optimizer", "iterators", "python", "hpcstrat"}
    assert set(_datasets(file)) == {
        "variables/weights",
        "variables/net/flag",
        "variables/net/parts/0",
        "variables/empty",
        "variables/scalar",
        "variables/größe",
        "optimizer/iterations",
        "optimizer/momentum/w",
        "python/counter",
        "hpcstrat/block_xxh3_64",
        "hpcstrat/commit",
        "hpcstrat/index",
    }


def test_root_attributes(file: h5py.File) -> None:
    assert _attribute_types(file) == ROOT_ATTRIBUTES
    assert file.attrs["hpcstrat_format"] == b"hpcstrat-checkpoint"
    assert file.attrs["hpcstrat_format_version"] == 2
    assert file.attrs["hpcstrat_version"] == hs.__version__.encode()
    assert file.attrs["step"] == 12
    assert file.attrs["num_replicas"] == 1


def test_dataset_attributes(file: h5py.File) -> None:
    for name, dataset in _datasets(file).items():
        wanted = {} if name.startswith(("python/", "hpcstrat/")) else DATASET_ATTRIBUTES
        if name == "hpcstrat/block_xxh3_64":
            wanted = TABLE_ATTRIBUTES
        assert _attribute_types(dataset) == wanted, name
    weights = file["variables/weights"].attrs
    assert weights["dtype"] == b"float64"
    assert weights["synchronization"] == b"on_write"
    assert weights["aggregation"] == b"none"
    assert weights["trainable"] == 1
    assert file["variables/net/flag"].attrs["trainable"] == 0


def test_groups_without_state_have_no_attributes(file: h5py.File) -> None:
    for name, group in _everything(file).items():
        if isinstance(group, h5py.Group) and name != "/":
            wanted = ITERATOR_ATTRIBUTES if name == "iterators/data" else {}
            assert _attribute_types(group) == wanted, name


def test_values_are_little_endian_and_of_natural_shape(file: h5py.File) -> None:
    types = {name: dataset.dtype.str for name, dataset in _datasets(file).items()}
    assert types == {
        "variables/weights": "<f8",
        "variables/net/flag": "|b1",
        "variables/net/parts/0": "<c8",
        "variables/empty": "<f2",
        "variables/scalar": "<i4",
        "variables/größe": "|u1",
        "optimizer/iterations": "<i8",
        "optimizer/momentum/w": "<f8",
        "python/counter": "|u1",
        "hpcstrat/block_xxh3_64": "<u8",
        "hpcstrat/commit": "|u1",
        "hpcstrat/index": "|u1",
    }
    assert file["variables/scalar"].shape == ()
    assert file["variables/scalar"][()] == -7
    assert file["variables/empty"].shape == (0, 3)
    momentum = np.full((2, 3), -0.5)
    np.testing.assert_array_equal(file["optimizer/momentum/w"], momentum)
    weights = np.arange(6.0).reshape(2, 3) + momentum
    np.testing.assert_array_equal(file["variables/weights"], weights)


def test_bfloat16_is_stored_as_its_bits(tmp_path: Path) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    variable = hs.Variable(np.array([1.0, -2.0], bfloat16))
    path = hs.CheckpointManager(tmp_path, variable=variable).save(0)
    with h5py.File(path) as file:
        dataset = file["variables/variable"]
        assert dataset.dtype.str == "<u2"
        assert dataset.attrs["dtype"] == b"bfloat16"
        assert dataset[:].tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int4"])
def test_types_of_other_libraries_come_back(tmp_path: Path, name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1, 2, 3], getattr(ml_dtypes, name))
    variable = hs.Variable(values)
    manager = hs.CheckpointManager(tmp_path, v=variable)
    path = manager.save(1)
    variable.assign(values[::-1])
    assert manager.restore() == 1
    np.testing.assert_array_equal(variable, values)
    # The file's content can be listed without the library of its special types.
    code = (
        "import sys\n"
        "from hpcstrat.checkpoint.file.reader import read_header\n"
        f"assert list(read_header({path!r}).entries) == ['variables/v']\n"
        "assert 'ml_dtypes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_lie_in_one_piece_without_filters(file: h5py.File) -> None:
    for name, dataset in _datasets(file).items():
        plist = dataset.id.get_create_plist()
        assert plist.get_layout() == h5py.h5d.CONTIGUOUS, name
        assert plist.get_nfilters() == 0, name
        assert dataset.maxshape == dataset.shape, name


def test_nothing_is_of_variable_length(file: h5py.File) -> None:
    for name, dataset in _datasets(file).items():
        kind = dataset.id.get_type()
        assert kind.get_class() not in (h5py.h5t.VLEN, h5py.h5t.REFERENCE), name
        assert not kind.detect_class(h5py.h5t.VLEN), name
        assert not kind.detect_class(h5py.h5t.STRING), name


def test_plain_state_is_json(file: h5py.File) -> None:
    state = json.loads(file["python/counter"][()].tobytes().decode())
    assert state == Counter().state


def test_file_is_of_a_version_that_old_readers_know(path: Path) -> None:
    content = path.read_bytes()
    assert content[:8] == b"\x89HDF\r\n\x1a\n"
    assert content[8] <= 3  # The superblock's version; HDF5 1.10 reads up to 3.


def test_reserved_space_beyond_the_data_is_given_back(
    path: Path, file: h5py.File
) -> None:
    assert path.stat().st_size == file.id.get_filesize()


def test_header_says_what_the_file_holds(path: Path) -> None:
    header = read_header(str(path))
    assert (header.step, header.num_replicas) == (12, 1)
    assert header.entries["variables/net/parts/0"].shape == (1,)
    assert header.entries["variables/net/parts/0"].dtype == "complex64"
    assert not any(entry.per_replica for entry in header.entries.values())
    assert header.iterators["data"]["shuffle_seed"] == 3
    assert header.python["counter"] == Counter().state


def test_reader_of_the_specification_reads_it(path: Path) -> None:
    guide = Path(__file__).parents[4] / "docs" / "checkpoint-format.md"
    code = guide.read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    step, values, positions, states = names["read_checkpoint"](path)
    assert step == 12
    assert values["variables/net/parts/0"] == 1 + 2j
    assert values["variables/net/flag"].dtype == np.bool_
    assert values["variables/empty"].shape == (0, 3)
    assert values["optimizer/iterations"] == 1
    assert len(values) == 8
    assert 0 <= positions["data"].pop("order_digest") < 2**63
    assert positions == {
        "data": {
            "epoch": 0,
            "global_position": 0,
            "num_rows": 10,
            "order_version": 2,
            "shuffle_seed": 3,
        }
    }
    assert states == {"counter": Counter().state}


def test_index_says_what_hdf5_says(path: Path, file: h5py.File) -> None:
    rows = {row[0]: row[1:] for row in json.loads(file["hpcstrat/index"][()].tobytes())}
    wanted = {}
    for name, dataset in _datasets(file).items():
        about = dataset.attrs
        if "aggregation" in about:
            names = ("dtype", "synchronization", "aggregation")
            texts = [about[key].decode() for key in names]
            place = [dataset.id.get_offset() or 0, dataset.nbytes]
            trainable = int(about["trainable"])
            wanted[name] = [list(dataset.shape), *texts, trainable, "", *place]
    assert rows == wanted
    assert len(rows) == 8


def test_files_without_an_index_are_read_as_those_with_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_index = open_checkpoint(str(path))
    monkeypatch.setattr(reader, "_index", lambda file, vouched: None)
    without = open_checkpoint(str(path))
    assert repr(without.header) == repr(with_index.header)
    assert without.extents == with_index.extents


def test_too_many_variables_for_an_index_are_saved_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MOST_INDEX_BYTES", 4096)
    variables = [hs.Variable(np.float64(k)) for k in range(200)]
    manager = hs.CheckpointManager(tmp_path, parts=variables)
    path = manager.save(1)
    with h5py.File(path) as file:
        assert set(file["hpcstrat"]) == {"block_xxh3_64", "commit"}
    for one in variables:
        one.assign(-1.0)
    assert manager.restore() == 1
    assert [float(one.numpy()) for one in variables] == list(range(200))


def test_folder_holds_the_checkpoint_alone(path: Path) -> None:
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_newer_format_is_refused_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = hs.CheckpointManager(tmp_path, x=hs.Variable(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(skeleton, "UNTYPED_VERSION", FORMAT_VERSION + 1)
        path = manager.save(1)
    with pytest.raises(
        hs.CheckpointError, match=f"version {FORMAT_VERSION + 1}"
    ) as caught:
        read_header(path)
    # A file of a newer version is not damaged: it is neither skipped nor removed.
    assert not isinstance(caught.value, hs.errors.CorruptCheckpointError)
    with pytest.raises(hs.CheckpointError, match=f"version {FORMAT_VERSION + 1}"):
        manager.restore()


@pytest.mark.parametrize("indexed", [False, True])
def test_unknown_aggregation_is_no_checkpoint(
    indexed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = hs.Variable(1.0)
    manager = hs.CheckpointManager(tmp_path, x=x)
    with monkeypatch.context() as patch:
        median = type("Median", (), {"name": "MEDIAN"})()
        patch.setattr(x, "aggregation", median)
        if not indexed:
            patch.setattr(schema, "MOST_INDEX_BYTES", 0)
        path = manager.save(1)
    with pytest.raises(
        hs.errors.CorruptCheckpointError, match=r"variables/x.*'median'"
    ):
        read_header(path)


def test_another_hdf5_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / checkpoint_name(1)
    with h5py.File(path, "w") as file:
        file["variables/weights"] = np.zeros(3)
    with pytest.raises(hs.errors.CorruptCheckpointError, match="of another program"):
        read_header(str(path))


@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [
        (os, "link", errno.EPERM),
        (disk, "_allocate", errno.EOPNOTSUPP),
        (os, "posix_fadvise", errno.ENOSYS),
    ],
)
def test_file_systems_without_a_call_serve_too(
    owner: Any, name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(code, "not supported")

    monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(disk, "_DIRECT", 0)
    variable = hs.Variable(np.arange(3.0))
    manager = hs.CheckpointManager(tmp_path, x=variable)
    path = manager.save(1)
    assert listed(tmp_path) == [os.path.basename(path)]
    variable.assign(np.zeros(3))
    with pytest.raises(hs.errors.CheckpointError, match="overwrite=True"):
        manager.save(1)
    manager.restore()
    np.testing.assert_array_equal(variable.numpy(), np.arange(3.0))
    manager.save(1, overwrite=True)
    assert listed(tmp_path) == [os.path.basename(path)]


@pytest.mark.parametrize("host", ["node1", "node-1.cluster.example.org", "node.h5.x"])
def test_temporary_name_tells_whose_it_is(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: host)
    monkeypatch.setattr(os, "getpid", lambda: 999_999_999)
    dead = folder.temporary_name(checkpoint_name(1))
    monkeypatch.undo()
    away = folder.temporary_name(checkpoint_name(1))
    monkeypatch.setattr(platform, "node", lambda: host)
    for name in (dead, away):
        assert step_of(name) is None
        (tmp_path / name).touch()
    folder.remove_abandoned(str(tmp_path))
    assert os.listdir(tmp_path) == [away]


def test_damaged_files_do_not_count_as_kept(tmp_path: Path) -> None:
    manager = hs.CheckpointManager(tmp_path, max_to_keep=2, x=hs.Variable(1.0))
    for step in (1, 2, 3):
        manager.save(step)
    for step in (4, 5):
        (tmp_path / f"ckpt-{step:010d}.h5").write_bytes(b"junk")
    manager.save(5)
    manager.save(6)
    names = [Path(path).name for path in manager.checkpoints]
    wanted = [f"ckpt-{step:010d}.h5" for step in (4, 5, 6)]
    assert names == wanted


@pytest.mark.parametrize(
    "objects",
    [
        {"net": {"a/b": 1, "a": {"b": 2}}},
        {"net": {"1": 1, 1: 2}},
        {"net": {"a": 1}, "net/a": 2},
        {"net": {"": 1}},
        {"net": {".": 1, "x": 2}},
        {"net": {"a": 1, "a/b": 2}},
        {"a\0b": 1},
    ],
    ids=repr,
)
def test_names_that_hdf5_cannot_keep_apart_are_refused(
    objects: dict[str, Any], tmp_path: Path
) -> None:
    def variables(thing: Any) -> Any:
        if isinstance(thing, dict):
            return {key: variables(value) for key, value in thing.items()}
        return hs.Variable(thing)

    with pytest.raises(ValueError, match="expected"):
        hs.CheckpointManager(tmp_path, **variables(objects))


@pytest.mark.parametrize("name", ["a/b", ".", ""])
def test_objects_with_strange_names_come_back_or_are_refused(
    name: str, tmp_path: Path
) -> None:
    def objects() -> dict[str, Any]:
        weights = hs.Variable(np.ones(2), name="w")
        return {"w": weights, name: hs.optimizers.SGD(0.5, momentum=0.5)}

    first, second = objects(), objects()
    try:
        manager = hs.CheckpointManager(tmp_path, **first)
    except ValueError:
        return
    for _ in range(2):
        first[name].apply_gradients([(np.ones(2), first["w"])])
    manager.save()
    hs.CheckpointManager(tmp_path, **second).restore()
    for one in (first, second):
        one[name].apply_gradients([(np.ones(2), one["w"])])
    np.testing.assert_array_equal(first["w"].numpy(), second["w"].numpy())


@pytest.mark.parametrize(
    "words",
    [["h5dump"], ["h5ls", "-r"], ["h5diff", "COPY"], ["h5repack", "-o"], ["h5stat"]],
    ids=lambda words: words[0],
)
def test_hdf5_tools_read_it(words: list[str], path: Path, tmp_path: Path) -> None:
    tool, *options = words
    program = shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed")
    other = tmp_path / "other.h5"
    command = [program, *options, str(path)]
    if tool == "h5diff":
        command = [program, str(path), shutil.copy(path, other)]
    elif tool == "h5repack":
        command = [program, str(path), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if tool in ("h5dump", "h5ls"):
        assert "weights" in done.stdout
    if tool == "h5repack":
        with h5py.File(path, "r") as one, h5py.File(other, "r") as two:
            assert set(_datasets(one)) == set(_datasets(two))
