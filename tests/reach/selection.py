"""The tests of a module of the library: their files, and arguments for pytest.

They are the files in the folders that mirror the module's (``tests/unit/FOLDER`` and
``tests/mpi/ranks/FOLDER``; ``tests/integrations/ranks``, ``tests/gpu``) that have its
name, and those that the table has for it. Where there is none: those that import or
name it, those of its folder, or the first ones of other modules of its folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = [
    "TABLE",
    "arguments_for",
    "files_for",
    "files_of",
    "mirrors",
    "unwanted",
    "with_name_of",
]

_ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "table.json"
# The files of tests that run those of rank tests, by the folder of these.
RUNNERS = {
    "tests/mpi/ranks": ("tests/mpi/test_ranks.py",),
    "tests/gpu": ("tests/gpu/test_ranks_on_gpu.py",),
    "tests/integrations/ranks": tuple(
        f"tests/integrations/test_{name}.py" for name in ("torch", "jax", "keras")
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
    files = [*with_name_of(module), *table.get(module, ())]
    files = files or _that_name(module) or _found(mirrors(folder))
    while not files and folder.name:
        alike = [files for name, files in table.items() if Path(name).parent == folder]
        files = [name for names in alike for name in names[:1]]
        folder = folder.parent
    return list(dict.fromkeys(files))


def mirrors(folder: Path) -> list[str]:
    """Return patterns of the test files in the mirrors of a folder of the library."""
    inside = folder.relative_to("hpcstrat")
    found = [f"tests/unit/{inside}/test_*.py", f"tests/mpi/ranks/{inside}/check_*.py"]
    match inside.parts:
        case "engine", "gpu", *_:
            found.append("tests/gpu/check_*.py")
        case "integrations", _, *_:
            found.append("tests/integrations/ranks/check_*.py")
    return found


def _found(patterns: Sequence[str]) -> list[str]:
    found = [path for pattern in patterns for path in sorted(_ROOT.glob(pattern))]
    return [os.fspath(path.relative_to(_ROOT)) for path in found]


def with_name_of(module: str) -> list[str]:
    """Return the test files in the mirrored folders that have the name of a module.

    A longer name begins with the other, and with ``_``.
    """
    path = Path(module)
    rooms = "".join(rf"(?:{re.escape(part)}_)?" for part in path.parts[-3:-1])
    own = []
    for file in _found(mirrors(path.parent)):
        name = re.sub(rf"^(?:test|check)_{rooms}", "", Path(file).stem)
        if f"{name}_".startswith(f"{path.stem}_") or path.stem.startswith(f"{name}_"):
            own.append(file)
    return own


@functools.cache
def _all_tests() -> dict[Path, str]:
    """Return the texts of all files of tests."""
    found: list[Path] = []
    for pattern in ("test_*.py", "check_*.py"):
        found += sorted((_ROOT / "tests").rglob(pattern))
    return {path: path.read_text() for path in found}


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
