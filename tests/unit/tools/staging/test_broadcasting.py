"""A staged environment has its source's files, or there is an error and no copy."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.tools.staging import broadcasting
from hpcstrat.tools.staging.broadcasting import Staged, copy_to_nodes
from hpcstrat.tools.staging.environment_files import RECORD
from hpcstrat.tools.staging.node_copy import NodeCopy

NAMES = [
    "a",
    "b c",
    "é",
    "-x",
    "new\nline",
    "[1]",
    b"\xff\xfe".decode("utf-8", "surrogateescape"),
    "__pycache__",
]


def stage(source: Path, place: Path, *, replaces: bool = False) -> Staged:
    """Copy an environment in this process alone."""
    return copy_to_nodes(Collectives(None), str(source), str(place), replaces=replaces)


def random_tree(folder: Path, rng: Any, depth: int = 0) -> None:
    """Make files, holes, links and folders with random names and rights."""
    folder.mkdir()
    files: list[Path] = []
    for name in rng.permutation(NAMES)[: rng.integers(0, len(NAMES))]:
        path = folder / str(name)
        kind = rng.integers(0, 8)
        if kind < 2 and depth < 3:
            random_tree(path, rng, depth + 1)
        elif kind == 3:
            target = str(rng.choice(["a", "../b c", "/usr/bin/env", "none"]))
            path.symlink_to(target)
        elif kind == 4 and files:
            os.link(files[0], path)
        else:
            path.write_bytes(rng.bytes(int(rng.choice([0, 1, 4096, 30_000]))))
            if kind == 5:
                with open(path, "r+b") as file:
                    file.truncate(100_000)
                    file.seek(90_000)
                    file.write(b"end")
            times = int(rng.integers(0, 2 * 10**18))
            os.utime(path, ns=(times, times))
            path.chmod(int(rng.choice([0o644, 0o755, 0o400, 0o4755, 0o666])))
            files.append(path)
    folder.chmod(int(rng.choice([0o755, 0o700, 0o555])) if depth else 0o755)


def description(folder: Path) -> dict[str, Any]:
    """Return everything about the files of a folder, by their names."""
    found: dict[str, Any] = {}
    links: dict[int, str] = {}
    for path in sorted(folder.rglob("*")):
        name, info = os.fspath(path.relative_to(folder)), path.lstat()
        if name == RECORD:
            continue
        about: list[Any] = [stat.S_IFMT(info.st_mode)]
        if path.is_symlink():
            about.append(os.readlink(path))
        else:
            about.append(stat.S_IMODE(info.st_mode))
        if stat.S_ISREG(info.st_mode):
            same = links.setdefault(info.st_ino, name)
            about += [info.st_mtime_ns, same, path.read_bytes()]
        found[name] = about
    return found


@given(seed=st.integers(0, 10**9))
def test_random_trees_are_copied_with_all_attributes(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = tmp_path_factory.mktemp("stage")
    random_tree(base / "source", rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcasting, "_PIECE_BYTES", int(rng.choice([9973, 1 << 18])))
        first = stage(base / "source", base / "copies" / "copy")
        again = stage(base / "source", base / "copies" / "copy")
    assert (first.num_new, again.num_new, again.read_bytes) == (1, 0, 0)
    assert os.listdir(base / "copies") == ["copy"]
    expected = description(base / "source")
    for about in expected.values():
        # A relative link that leads out of the source becomes an absolute one.
        if about[0] == stat.S_IFLNK and about[1] == "../b c":
            about[1] = None
    found = description(base / "copies" / "copy")
    for name, about in found.items():
        if name in expected and expected[name][1] is None:
            outside = os.path.dirname(name) == ""
            assert about[1] == (str(base / "b c") if outside else "../b c")
            about[1] = None
    assert found == expected
    holes = sum(path.lstat().st_blocks for path in (base / "source").rglob("*"))
    made = sum(path.lstat().st_blocks for path in (base / "copies" / "copy").rglob("*"))
    assert made <= holes + 8 * len(found) + 8
    shutil.rmtree(base, onerror=lambda _, path, __: None)


def wheel(folder: Path) -> Path:
    """Write a wheel with a module and a console script."""
    path = folder / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(
            "small.py",
            "import sys\ndef main():\n    print(sys.prefix, __file__, sys.argv[1])\n",
        )
        about = "small-1.dist-info/"
        file.writestr(
            f"{about}METADATA", "Metadata-Version: 2.1\nName: small\nVersion: 1\n"
        )
        file.writestr(
            f"{about}WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(
            f"{about}entry_points.txt", "[console_scripts]\nsmall = small:main\n"
        )
        file.writestr(f"{about}RECORD", "")
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with a package that has a console script."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True
    )
    (purelib,) = (folder / "env").glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", folder / "env", "install"]
    subprocess.run(
        [*command, "-q", "--no-index", "--no-compile", wheel(folder)], check=True
    )
    assert (purelib / "small.py").exists()
    return folder / "env"


@pytest.mark.parametrize(
    "kind", ["folder", ".tar", ".tar.gz", ".tar.zst", "inside.tar"]
)
def test_scripts_of_a_staged_environment_use_its_own_packages(
    environment: Path, tmp_path: Path, kind: str
) -> None:
    if kind == ".tar.zst" and shutil.which("zstd") is None:
        pytest.skip("there is no command zstd")
    source = tmp_path / "env"
    shutil.copytree(environment, source, symlinks=True)
    for script in (source / "bin").iterdir():
        if not script.is_symlink():
            text = script.read_text().replace(str(environment), str(source))
            script.write_text(text)
    given = source
    if kind != "folder":
        given = tmp_path / ("archive" + kind.replace("inside", ""))
        what = "." if kind == "inside.tar" else "env"
        where = source if kind == "inside.tar" else tmp_path
        subprocess.run(["tar", "-C", where, "-caf", given, what], check=True)
    place = tmp_path / "node" / "copy"
    staged = stage(given, place)
    if kind != "folder":
        assert staged.read_bytes == given.stat().st_size
    # The copy must not need the source.
    shutil.rmtree(source)
    program = "import small, sys; small.main()"
    for command in (["small"], ["python", "-c", program]):
        done = subprocess.run(
            [place / "bin" / command[0], *command[1:], "word"],
            check=True,
            capture_output=True,
            text=True,
        )
        prefix, file, _ = done.stdout.split()
        assert prefix == str(place)
        assert file.startswith(str(place))
    activate = f". {place}/bin/activate && command -v small && echo $VIRTUAL_ENV"
    done = subprocess.run(
        ["sh", "-c", activate], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [f"{place}/bin/small", str(place)]


def test_too_little_space_is_an_error_before_a_file_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in "ab":
        with open(source / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 16)
    need = 2 << 16
    space = os.statvfs("/dev/shm")
    assert space.f_files
    few = NodeCopy.free

    def limited(self: NodeCopy) -> Any:
        found = few(self)
        return type(found)(found.host, need - 1, found.inodes, found.record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeCopy, "free", limited)
        with pytest.raises(
            ValueError, match=r"room for 131,072 bytes and 3 files .*131,071 bytes"
        ):
            stage(source, tmp_path / "copies" / "copy")
    assert os.listdir(tmp_path / "copies") == []
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(source, "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeCopy, "free", limited)
        with pytest.raises(ValueError, match=r"room for the files of .*x\.tar"):
            stage(tmp_path / "x.tar", tmp_path / "copies" / "copy")
    assert os.listdir(tmp_path / "copies") == []


def test_other_files_at_the_place_are_kept(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "copies" / "copy"
    source.mkdir()
    (source / "a").write_text("1")
    place.mkdir(parents=True)
    (place / "mine").write_text("2")
    with pytest.raises(ValueError, match="files that are no copy of hpcstrat stage"):
        stage(source, place, replaces=True)
    shutil.rmtree(place)
    stage(source, place)
    (source / "a").write_text("longer")
    with pytest.raises(
        ValueError, match=r"a copy of .*source with other files; pass --replace"
    ):
        stage(source, place)
    assert (place / "a").read_text() == "1"
    assert stage(source, place, replaces=True).num_new == 1
    assert (place / "a").read_text() == "longer"
    # A damaged copy is written again.
    times = (place / "a").stat().st_mtime_ns
    (place / "a").write_text("edited")
    os.utime(place / "a", ns=(times, times))
    assert stage(source, place).num_new == 1
    assert (place / "a").read_text() == "longer"
    assert os.listdir(place.parent) == ["copy"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    source, copies = tmp_path / "source", tmp_path / "copies"
    source.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, living = (
        copies / f".copy.partial-{gone.pid}",
        copies / f".copy.partial-{os.getppid()}",
    )
    left.mkdir(parents=True)
    living.mkdir()
    stage(source, copies / "copy")
    assert sorted(os.listdir(copies)) == [living.name, "copy"]


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b damaged"])
def test_damaged_archives_and_odd_files_are_errors(
    tmp_path: Path, content: bytes
) -> None:
    archive = tmp_path / "x.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"archive that can be unpacked, found .*x\.tar\.gz"
    ):
        stage(archive, tmp_path / "copies" / "copy")
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    with pytest.raises(ValueError, match="found pipe, which is a socket, a pipe"):
        stage(source, tmp_path / "copies" / "copy")
    with pytest.raises(FileNotFoundError):
        stage(tmp_path / "nothing", tmp_path / "copies" / "copy")
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"folder, or an archive .*found the file"):
        stage(tmp_path / "x.txt", tmp_path / "copies" / "copy")
    assert os.listdir(tmp_path / "copies") == []


def test_names_that_lead_out_of_an_archive_are_errors(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    with pytest.raises(ValueError, match=r"relative names .*found \.\./outside"):
        stage(tmp_path / "x.tar", tmp_path / "copies" / "copy")
    assert (
        os.listdir(tmp_path) == ["x.tar", "copies"]
        or not (tmp_path / "outside").exists()
    )
