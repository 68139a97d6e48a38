"""The commands that inspect checkpoints, on files of one replica."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

import hpcstrat as hs
from hpcstrat.checkpoint import bench as ways
from hpcstrat.checkpoint.bench import MeasuredWay, Way
from hpcstrat.checkpoint.disk import file_system_name
from hpcstrat.cli.main import main
from hpcstrat.errors import CheckpointError
from hpcstrat.testing.launcher import clean_environment
from hpcstrat.tools.checkpoints.bench_command import advise, parse_size

VERSION_1 = Path(__file__).parents[3] / "old_files" / "version-1.h5"


def _run(*words: Any) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2."""
    variables = {
        "w": hs.Variable(np.arange(6.0).reshape(2, 3), name="w"),
        "count": hs.Variable(3, dtype="int64", name="count"),
        "half": hs.Variable(np.ones(5), dtype="float16", name="half"),
    }
    manager = hs.CheckpointManager(tmp_path / "checkpoints", **variables)
    manager.save(1)
    variables["w"].assign([[0.0, 1.0, 2.0], [3.0, 4.5, 5.0]])
    manager.save(2)
    manager.close()
    return tmp_path / "checkpoints"


def _paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("ckpt-*.h5"))


def test_verify_finds_a_flipped_bit(folder: Path) -> None:
    first, second = _paths(folder)
    found = _run("verify", folder)
    assert found.exit_code == 0, found.output
    assert found.output.count("good, ") == 2
    data = bytearray(second.read_bytes())
    with h5py.File(second) as file:
        data[file["variables/w"].id.get_offset() + 3] ^= 16
    second.write_bytes(data)
    found = _run("verify", first, second)
    assert found.exit_code == 1
    assert f"{second}: DAMAGED: " in found.output
    assert f"{first}: good" in found.output
    assert _run("export", second, folder / "x.npz").exit_code == 1
    assert not (folder / "x.npz").exists()


def test_verify_does_not_vouch_for_what_has_no_hashes(tmp_path: Path) -> None:
    found = _run("verify", VERSION_1)
    assert found.exit_code == 1
    assert "not verified" in found.output
    assert _run("verify", tmp_path).exit_code == 1


def test_diff_names_what_differs(folder: Path) -> None:
    first, second = _paths(folder)
    found = _run("diff", first, second)
    assert found.exit_code == 1
    assert "steps 1 and 2" in found.output
    assert "1 of 6 elements by at most 0.5" in found.output
    assert "[1, 1]: 4.0 and 4.5" in found.output.replace("\n", " ")
    assert "count" not in found.output
    same = _run("diff", first, first)
    assert same.exit_code == 0
    assert "no difference" in same.output


@pytest.mark.parametrize("name", ["plain.npz", "plain.h5"])
def test_export_is_read_by_others(folder: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    found = _run("export", _paths(folder)[0], output)
    assert found.exit_code == 0, found.output
    opened: Any = np.load(output) if name.endswith("z") else h5py.File(output)
    with opened as file:
        assert np.array_equal(file["variables/w"][...], np.arange(6.0).reshape(2, 3))
        assert file["variables/count"][...] == 3
        assert file["variables/half"].dtype == np.float16
    again = _run("export", _paths(folder)[0], output)
    assert again.exit_code == 1
    assert "found the file" in again.output
    assert _run("export", _paths(folder)[0], tmp_path / "x.txt").exit_code == 1


def test_list_and_show(folder: Path) -> None:
    found = _run("ls", folder)
    assert found.exit_code == 0
    assert "ckpt-0000000002.h5" in found.output
    shown = _run("show", _paths(folder)[0])
    assert "2 x 3" in shown.output


def test_metrics_are_shown(tmp_path: Path) -> None:
    value = hs.Variable(np.ones(2), name="w")
    with hs.CheckpointManager(tmp_path, net=value) as manager:
        manager.save(1, metrics={"val_loss": 0.25})
    assert "metric val_loss: 0.25\n" in _run("show", _paths(tmp_path)[0]).output


def test_long_names_are_whole_in_pipes_and_folded_on_terminals(tmp_path: Path) -> None:
    parts = [f"{'layer' * 9}-{number}" for number in range(3)]
    net = {parts[0]: {parts[1]: {parts[2]: hs.Variable(np.ones(2))}}}
    streams = hs.get_strategy().random("noise", seed=3)
    with hs.CheckpointManager(tmp_path, net=net, noise=streams) as manager:
        path = manager.save(1)
        net[parts[0]][parts[1]][parts[2]].assign([1.0, 2.0])
        other = manager.save(2)
    name = "/".join(["variables/net", *parts])
    lines = _run("show", path).output.splitlines()
    assert len([line for line in lines if f" {name} " in line]) == 1
    random = [line for line in lines if "noise" in line]
    about = "{'bit_generator': 'Philox', 'root_entropy': 3, 'generation': 0}"
    assert random == [f"rng/noise: {about}"]
    assert name in _run("diff", path, other).output
    shown = _on_terminal_only("show", path)
    cells = [line.split("\u2502")[1] for line in shown if "\u2502" in line]
    assert name in "".join(map(str.strip, cells))


def _on_terminal_only(*words: Any) -> list[str]:
    """Return the lines of the output on a terminal with 80 columns."""
    ours, theirs = pty.openpty()
    process = _started(*words, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = bytearray()
    with contextlib.suppress(OSError):
        while data := os.read(ours, 4096):
            shown.extend(data)
    os.close(ours)
    assert process.wait(100) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    return text.splitlines()


def test_brackets_in_names_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "[red]"
    folder.mkdir()
    value = hs.Variable(np.ones(2), name="w")
    with hs.CheckpointManager(folder, net={"[bold]": value}) as manager:
        manager.save(1)
        value.assign([1.0, 2.0])
        manager.save(2)
    first, second = _paths(folder)
    assert "net/[bold]" in _run("show", first).output
    assert "net/[bold]" in _run("diff", first, second).output
    first.write_bytes(b"")
    assert "/[red]/" in _run("ls", folder).output


def _newer(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["hpcstrat_format"] = np.bytes_(b"hpcstrat-checkpoint")
        file.attrs["hpcstrat_format_version"] = 99


def _foreign(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.ones(3)


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# Bad inputs instead of a checkpoint, and words of the error message.
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text": (lambda path: path.write_text("no checkpoint\n"), "found a text file"),
    "newer": (_newer, "version 99"),
    "foreign": (_foreign, "found an HDF5 file of another program, which holds x"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "truncated": (_truncated, "cannot be read"),
    "missing": (Path.unlink, "No such file"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "a folder"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "something else"),
    "unreadable": (lambda path: None, "Permission denied"),
}


@pytest.fixture(params=BAD)
def bad(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """Return a kind of bad input, and its path, in a folder with a good checkpoint."""
    path = _paths(folder)[0]
    BAD[request.param][0](path)
    if request.param == "unreadable":
        real = os.open

        def refuse(name: Any, *arguments: Any, **options: Any) -> int:
            if os.fspath(name) == str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return real(name, *arguments, **options)

        # Fake the refusal, because tests may run as root, which may read all files.
        monkeypatch.setattr(os, "open", refuse)
    return request.param, path


@pytest.mark.parametrize("command", ["show", "verify", "diff", "diff2", "export"])
def test_bad_file_is_one_line(
    bad: tuple[str, Path], command: str, tmp_path: Path
) -> None:
    kind, path = bad
    good = path.parent / "ckpt-0000000002.h5"
    words = {
        "diff": ("diff", path, good),
        "diff2": ("diff", good, path),
        "export": ("export", path, tmp_path / "out.npz"),
    }.get(command, (command, path))
    found = _run(*words)
    if (command, kind) == ("verify", "folder"):
        # A folder is valid for this command, but this folder has no checkpoints.
        assert (found.exit_code, found.output) == (1, "no checkpoints found\n")
        return
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit)
    assert len(found.output.splitlines()) == 1, found.output
    assert BAD[kind][1] in found.output
    assert str(path) in found.output
    assert not (tmp_path / "out.npz").exists()


def test_list_goes_on_after_a_bad_file(bad: tuple[str, Path]) -> None:
    kind, path = bad
    found = _run("ls", path.parent)
    assert "ckpt-0000000002.h5" in found.output
    said = [line for line in found.output.splitlines() if line.startswith(path.name)]
    if kind == "missing":
        assert (found.exit_code, said) == (0, [])
        return
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit)
    assert len(said) == 1
    assert BAD[kind][1] in said[0]


def test_list_passes_over_a_file_that_goes_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = map(str, _paths(folder))
    gone = str(folder / "ckpt-0000000000.h5")
    listed = lambda _: [gone, first, second]  # noqa: E731
    monkeypatch.setattr("hpcstrat.tools.checkpoints.commands.list_checkpoints", listed)
    found = _run("ls", folder)
    assert found.exit_code == 0, found.output
    assert "ckpt-0000000002.h5" in found.output


def test_list_of_a_folder_whose_files_cannot_be_looked_at_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = os.lstat

    def refused(path: Any, **options: Any) -> os.stat_result:
        # Fake a folder that may be listed, but not entered, because root may do both.
        if str(path).startswith(str(folder / "ckpt-")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", refused)
    found = _run("ls", folder)
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit)
    assert len(found.output.splitlines()) == 1, found.output
    assert "Permission denied; check the path" in found.output


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_list_of_what_is_no_folder_is_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("")
    found = _run("ls", path)
    assert found.exit_code == 1
    assert found.output.startswith("Error: expected a folder, found ")
    assert len(found.output.splitlines()) == 1


def test_verify_goes_on_after_a_bad_file(bad: tuple[str, Path]) -> None:
    found = _run("verify", bad[1], bad[1].parent / "ckpt-0000000002.h5")
    assert found.exit_code == (0 if bad[0] == "folder" else 1)
    assert "ckpt-0000000002.h5: good, " in found.output
    assert ("DAMAGED" in found.output) is (bad[0] in ("empty", "truncated"))
    other = bad[0] in ("text", "foreign")
    assert ("no checkpoint: expected" in found.output) is other


def _started(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command in a separate process."""
    program = "from hpcstrat.cli import main; main()"
    paths = [str(Path(hs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TERM": "xterm"}
    return subprocess.Popen(
        [sys.executable, "-c", program, "ckpt", *map(str, words)],
        env=clean_environment(changes),
        **options,
    )


def _on_terminal(*words: Any) -> tuple[str, str]:
    """Return the standard output, and the output on a terminal."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                shown.extend(data)
        except OSError:
            # The terminal was closed.
            return

    reader = threading.Thread(target=read)
    reader.start()
    process = _started(*words, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    output = process.communicate(timeout=100)[0]
    reader.join()
    os.close(ours)
    return output.decode(), shown.decode()


def test_progress_is_shown_on_a_terminal_only(folder: Path, tmp_path: Path) -> None:
    first, second = _paths(folder)
    for words in (
        ("verify", first),
        ("diff", first, second),
        ("export", first, tmp_path / "x.npz"),
    ):
        output, shown = _on_terminal(*words)
        assert "100%" in shown, words
        (tmp_path / "x.npz").unlink(missing_ok=True)
        alone = _run(*words)
        assert alone.stdout == output
        assert alone.stderr == ""


def test_bench_measures_all_layouts_and_leaves_nothing(tmp_path: Path) -> None:
    folder, report = tmp_path / "there", tmp_path / "report.json"
    folder.mkdir()
    words = ("bench", folder, "--size", "32MiB", "--rounds", "2", "--json", report)
    output, shown = _on_terminal(*words)
    assert "100%" in shown
    assert "threads that stand for ranks" in output
    assert output.splitlines()[0] == f"{folder}: {file_system_name(str(folder))}"
    assert output.splitlines()[-1].startswith("direct_io: ")
    found = json.loads(report.read_text())
    ways = [(row["shared"], row["direct"]) for row in found["layouts"]]
    assert set(ways) == {(a, b) for a in (True, False) for b in (True, False)}
    assert {row["piece_bytes"] for row in found["layouts"]} >= {1 << 20}
    assert all(len(row["write_seconds"]) == 2 for row in found["layouts"])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{}/missing",), "found none at"),
        (("{}/file",), "expected a folder"),
        (("{}", "--size", "many"), "found 'many'"),
        (("{}", "--size", "0MB"), "found '0MB'"),
        (("{}", "--size", "64"), "found '64'; give a number above 0 and its unit"),
        (("{}", "--size", "1MiB"), "writers, found 1 MiB; give a size of"),
        (("{}", "--size", "1000000TiB"), "expected room for"),
        (("{}", "--json", "{}/missing/x"), "that can be written"),
    ],
)
def test_bench_refuses_in_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").write_text("")
    found = _run("bench", *(word.format(tmp_path) for word in words))
    assert found.exit_code == 1
    assert len(found.output.splitlines()) == 1, found.output
    assert said in found.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_bench_with_unknown_options_is_an_error_of_usage(tmp_path: Path) -> None:
    assert _run("bench", tmp_path, "--rounds", "0").exit_code == 2
    assert _run("bench").exit_code == 2


def _nothing(*_: Any) -> None:
    """Pretend to write, without effect."""


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("name", "instead", "said"),
    [
        ("write_all", _nothing, "what was read is not what was written"),
        ("write_all", _full, "No space left on device"),
        ("flush", _full, "No space left on device"),
        ("create", _full, "No space left on device"),
        ("read_into", _full, "No space left on device"),
    ],
)
def test_bench_that_fails_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    instead: Callable[..., None],
    said: str,
) -> None:
    monkeypatch.setattr(ways, name, instead)
    found = _run("bench", tmp_path, "--size", "16MiB")
    assert found.exit_code == 1
    assert said in found.output
    assert len(found.output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_bench_says_where_direct_writes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ways.open_to_write
    monkeypatch.setattr(ways, "open_to_write", lambda path, _: real(path, False))
    found = _run("bench", tmp_path, "--size", "16MiB", "--rounds", "1")
    assert found.exit_code == 0, found.output
    assert "refuses direct writes" in found.output.splitlines()[-1]


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_bench_that_is_ended_leaves_nothing(tmp_path: Path, number: int) -> None:
    words = ("bench", tmp_path, "--size", "16MiB", "--rounds", "100000")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = _started(*words, **pipes, start_new_session=True)
    try:
        _until(lambda: any(tmp_path.glob(".hpcstrat-bench-*/*")))
        # Signal the whole process group, as terminals and launchers do.
        os.killpg(process.pid, number)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert b"Traceback" not in said
    _until(lambda: not any(tmp_path.iterdir()))


def _measured(*, shared: bool, direct: bool, seconds: list[float]) -> MeasuredWay:
    return MeasuredWay(Way(shared, direct, 1 << 20), 1 << 30, seconds, [1.0])


@pytest.mark.parametrize(
    ("on", "off", "auto", "said"),
    [
        ([1.0, 1.0], [2.0, 2.0], True, '"on" writes 2.0 times as fast; nothing'),
        ([1.0, 1.0], [2.0, 2.0], False, "set HPCSTRAT_DIRECT_IO=on"),
        ([2.0, 2.0], [1.0, 1.0], True, "set HPCSTRAT_DIRECT_IO=off"),
        ([2.0, 2.0], [1.0, 1.0], False, '"off" writes 2.0 times as fast; nothing'),
        ([1.0, 1.0], [1.05, 1.05], False, 'do not differ clearly; nothing to set: "'),
        ([1.0, 3.0], [2.0, 2.9], True, 'clearly; nothing to set: "auto" picks "on"'),
    ],
)
def test_advice_names_the_faster_setting(
    on: list[float], off: list[float], auto: bool, said: str
) -> None:
    results = [
        _measured(shared=shared, direct=direct, seconds=on if direct else off)
        for shared in (True, False)
        for direct in (True, False)
    ]
    (line,) = advise(results, auto, "Lustre", "there")
    assert said in line


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [("Lustre", "lfs setstripe -c -1 -S 16M there"), ("NFS", "a local disk")],
)
def test_advice_names_a_remedy_for_a_slow_shared_file(kind: str, remedy: str) -> None:
    results = [
        _measured(shared=shared, direct=direct, seconds=[3.0 if shared else 1.0])
        for shared in (True, False)
        for direct in (True, False)
    ]
    first, last = advise(results, True, kind, "there")
    assert "3.0 times as fast as one file" in first
    assert remedy in first
    assert last.startswith("direct_io: ")


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [("256MiB", 256), ("1.5 GiB", 1536), ("2g", 2048), ("3MB", 3), ("1B", 1)],
)
def test_sizes_are_rounded_up(text: str, mebibytes: int) -> None:
    assert parse_size(text) == mebibytes << 20


@pytest.mark.parametrize("text", ["", "-1", "1PB", "MiB", "1e3", "0.0MB", "64", "1.5"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="expected a size such as"):
        parse_size(text)


# File system names of stat(1) that differ from the command's names.
NAMES = {"ext2/ext3": "ext4", "overlay": "overlayfs"}


@pytest.mark.skipif(shutil.which("stat") is None, reason="there is no stat(1)")
@pytest.mark.parametrize("path", ["/", "/dev/shm", "/proc"])
def test_file_system_is_named(path: str) -> None:
    words = ["stat", "-f", "-c", "%T %t", path]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    name, number = done.stdout.split()
    expected = NAMES.get(name, name), f"of type 0x{number}"
    assert file_system_name(path).lower() in expected


def test_file_system_of_nothing_is_unknown() -> None:
    assert file_system_name("/nowhere/at/all") == "unknown"


def _archive(path: Path) -> None:
    np.savez(path, w=np.ones(3))


def _array(path: Path) -> None:
    np.save(path, np.ones(3))


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"w": 1}))


def _bytes_of_any_kind(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


OTHERS: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
    ("notes.txt", lambda path: path.write_text("größe\n" * 900), "a text file"),
    ("weights.npz", _archive, "a ZIP archive, such as"),
    ("weights.npy", _array, "an array of numpy.save"),
    ("model.pt", _pickle, "a pickle"),
    ("nothing", Path.touch, "an empty file"),
    ("image.bin", _bytes_of_any_kind, "a file of another kind"),
    ("keras.h5", _foreign, "an HDF5 file of another program, which holds x"),
    ("ckpt-0000000003.h5", _archive, "a ZIP archive, such as"),
)


@pytest.mark.parametrize(("name", "make", "said"), OTHERS)
@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_is_no_checkpoint_is_named(
    command: str, name: str, make: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    make(path)
    if not path.exists():
        # NumPy has appended its own suffix to the name.
        path.with_name(f"{name}.npz").rename(path)
    found = _run(command, path)
    assert found.exit_code == 1
    assert f"expected a checkpoint, found {said}" in found.output
    assert "remove" not in found.output
    assert "DAMAGED" not in found.output
    assert len(found.output.splitlines()) == 1


def test_list_shows_links_that_lead_nowhere(folder: Path) -> None:
    (folder / "ckpt-0000000007.h5").symlink_to("ckpt-0000000007.h5")
    found = _run("ls", folder)
    assert found.exit_code == 1
    assert isinstance(found.exception, SystemExit)
    assert "ckpt-0000000007.h5: expected a readable checkpoint" in found.output
