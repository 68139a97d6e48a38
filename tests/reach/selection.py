"""The tests of a module of the library: their files, and arguments for pytest.

They are the files in the folders that mirror the module's (``tests/unit/FOLDER``,
``tests/mpi/ranks/FOLDER``) whose names begin with its name, and those that the table
has for it. Where there is none: those that import or name it, those of its folder, or
the first ones of other modules of its folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["TABLE", "arguments_for", "files_for", "files_of", "mirrors", "unwanted"]

_ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "table.json"
# The files of tests that run those of rank tests, by the folder of these.
RUNNERS = {
    "tests/mpi/ranks": ("tests/mpi/test_ranks.py",),
    "tests/gpu": ("tests/gpu/test_ranks_on_gpu.py",),
    "tests/integrations/ranks": tuple(
        f"tests/integrations/test_{name}.py"
        for name in ("torch", "jax", "keras", "logical")
    ),
}
# First, last and middle ranks; where a file does not run there, as few as it runs on.
_NUM_RANKS = 3
_MOST_BY_CHANCE = 6


def files_for(modules: Sequence[str]) -> list[str]:
    """Return the test files of modules, which are given by paths."""
    table = json.loads(TABLE.read_text())
    files: list[str] = []
    for given in modules:
        name = os.path.relpath(Path(given).resolve(), _ROOT)
        if not name.startswith("hpcstrat/") or not (_ROOT / name).is_file():
            message = f"expected a module of hpcstrat, found {given}; give its path"
            raise ValueError(message)
        files += [file for file in files_of(name, table) if file not in files]
    return files


def files_of(module: str, table: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the test files of a module, by its path from the root of the repository.

    Those that have its name come first.
    """
    folder = Path(module).parent
    files = [*_with_name_of(module), *table.get(module, ())]
    files = files or _that_name(module) or _in(mirrors(folder))
    while not files and folder.name:
        alike = [files for name, files in table.items() if Path(name).parent == folder]
        files = [name for names in alike for name in names[:1]]
        folder = folder.parent
    return list(dict.fromkeys(files))


def mirrors(folder: Path) -> list[Path]:
    """Return the folders of tests that mirror a folder of the library."""
    inside = folder.relative_to("hpcstrat")
    tests = _ROOT / "tests"
    return [tests / "unit" / inside, tests / "mpi" / "ranks" / inside]


@functools.cache
def _all_tests() -> dict[Path, str]:
    """Return the texts of all files of tests."""
    found: list[Path] = []
    for pattern in ("test_*.py", "check_*.py"):
        found += sorted((_ROOT / "tests").rglob(pattern))
    return {path: path.read_text() for path in found}


def _in(folders: Sequence[Path]) -> list[str]:
    found = [path for path in _all_tests() if path.parent in folders]
    return [os.fspath(path.relative_to(_ROOT)) for path in found]


def _with_name_of(module: str) -> list[str]:
    path = Path(module)
    own = re.compile(rf"(test|check)_{re.escape(path.stem)}(_\w+)?\.py")
    return [name for name in _in(mirrors(path.parent)) if own.match(Path(name).name)]


def _that_name(module: str) -> list[str]:
    """Return test files that import a module, or have its path or file name in them."""
    path = Path(module)
    dotted = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    parent, _, stem = dotted.rpartition(".")
    imported = rf"from {re.escape(parent)} import \(?[^)]*?\b{re.escape(stem)}\b"
    words = re.compile(rf"{re.escape(dotted)}\b|\b{re.escape(path.name)}|{imported}")
    found = [path for path, text in _all_tests().items() if words.search(text)]
    return [os.fspath(path.relative_to(_ROOT)) for path in found[:_MOST_BY_CHANCE]]


def _runners(file: str) -> tuple[str, ...]:
    """Return what runs a file of rank tests; none for a file that pytest runs."""
    if not Path(file).name.startswith("check_"):
        return ()
    return next(
        runners for folder, runners in RUNNERS.items() if file.startswith(folder)
    )


def arguments_for(files: Sequence[str]) -> list[str]:
    """Return the arguments of pytest that collect test files, and others of ranks."""
    found = [name for file in files for name in _runners(file) or (file,)]
    return [str(_ROOT / name) for name in dict.fromkeys(found)]


def unwanted(items: Sequence[pytest.Item], files: Sequence[str]) -> set[pytest.Item]:
    """Return the items for other files of rank tests, or for more numbers of ranks."""
    left_out: set[pytest.Item] = set()
    sizes: dict[tuple[str, str], dict[int, list[pytest.Item]]] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        runner = os.path.relpath(item.path, _ROOT)
        folders = [folder for folder, names in RUNNERS.items() if runner in names]
        if not folders:
            continue
        if f"{folders[0]}/{params.get('file')}.py" not in files:
            left_out.add(item)
            continue
        key = item.nodeid.partition("[")[0], params["file"]
        sizes.setdefault(key, {}).setdefault(params["n"], []).append(item)
    for by_size in sizes.values():
        best = _NUM_RANKS if _NUM_RANKS in by_size else min(by_size)
        left_out.update(
            item for n, found in by_size.items() if n != best for item in found
        )
    return left_out
