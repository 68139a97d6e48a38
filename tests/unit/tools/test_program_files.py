"""Programs that ``hpcstrat torch`` and ``hpcstrat jax`` accept, and their refusals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpcstrat.tools.program_files import find_program, require_statements
from tests.docs.said import assert_said

FOLDER = os.path.dirname(sys.executable)


def _command(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_file_and_a_folder_are_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train").mkdir()
    # A folder without __main__.py is no program, but the command may have its name.
    with pytest.raises(ValueError, match="no file and no command 'train'"):
        find_program("train")
    Path("train/__main__.py").touch()
    Path("fit.py").touch()
    assert find_program("train") == "train"
    assert find_program("fit.py") == "fit.py"


def test_commands_of_the_environment_are_found_by_name() -> None:
    assert find_program("pytest") == os.path.join(FOLDER, "pytest")


@pytest.mark.parametrize(
    "first",
    [
        f"#!{sys.executable}\n",
        "#!/usr/bin/env python3\n",
        f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_commands_on_the_path_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    path = _command(tmp_path, "train-it", f"{first}print('ran')\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_program("train-it") == str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho hello\n", "a Python program, found .*train-it, which is not"),
        ("\x7fELF", "a Python program, found .*train-it, which is not"),
        ("#!/opt/other/bin/python\n", "found .*train-it of /opt/other/bin/python;"),
    ],
)
def test_other_commands_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    _command(tmp_path, "train-it", text)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=words):
        find_program("train-it")


def test_a_similar_command_is_named() -> None:
    with pytest.raises(ValueError, match="no command 'py-test', but pytest;"):
        find_program("py-test")


ONLY_DEFINES = '''
"""Functions."""
from __future__ import annotations
import logging
try:
    import nothing
except ImportError:
    nothing = None
logger = logging.getLogger(__name__)
NAMES: list[str] = []
if NAMES:
    import abc
def main():
    print("ran")
class Trainer:
    pass
'''


@pytest.mark.parametrize(
    ("more", "acts"),
    [
        ("", False),
        ("if __name__ == '__main__':\n    main()\n", True),
        ("main()\n", True),
        ("for _ in range(2):\n    main()\n", True),
        ("with open('/dev/null'):\n    main()\n", True),
        ("try:\n    main()\nexcept OSError:\n    pass\n", True),
        ("if nothing is None:\n    main()\n", True),
    ],
)
def test_programs_that_only_define_functions_are_refused(
    tmp_path: Path, more: str, acts: bool
) -> None:
    path = tmp_path / "fit.py"
    path.write_text(ONLY_DEFINES + more)
    if acts:
        require_statements(str(path), module=False)
        return
    words = "found that fit.py only defines functions and classes, .*; add a call of"
    with pytest.raises(ValueError, match=words):
        require_statements(str(path), module=False)


def test_the_command_that_calls_a_module_s_functions_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tmp_path, "fits.py").write_text(ONLY_DEFINES)
    installed = tmp_path / "fits-1.0.dist-info"
    installed.mkdir()
    Path(installed, "METADATA").write_text("Name: fits\nVersion: 1.0\n")
    scripts = "[console_scripts]\nfit-it = fits:main\n"
    Path(installed, "entry_points.txt").write_text(scripts)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="expected a program") as caught:
        require_statements("fits", module=True)
    assert_said("only-defines", str(caught.value))


def test_modules_of_a_package_that_runs_are_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fits").mkdir()
    Path("fits/train.py").write_text(ONLY_DEFINES)
    Path("fits/__main__.py").write_text("from fits.train import main\nmain()\n")
    require_statements("fits", module=True)
    with pytest.raises(ValueError, match=r"fits.train only defines .*; run -m fits$"):
        require_statements("fits.train", module=True)


@pytest.mark.parametrize("name", ["nowhere", "json.nowhere", "json.tool", "pytest"])
def test_other_modules_are_left_to_python(name: str) -> None:
    require_statements(name, module=True)


def test_programs_with_only_statements_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "fit.py"
    path.write_text("x = print(1)\n")
    require_statements(str(path), module=False)
    # Python itself reports that a program cannot be read.
    path.write_text("def main(:\n")
    require_statements(str(path), module=False)
