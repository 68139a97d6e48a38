"""Paths and names in back quotes, in README and pages, exist.

In pages for developers, classes, methods and functions must be where the page says.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Folders that an example program creates.
_OF_PROGRAMS = {"logs/", "runs/"}
# Files of users, which pages name as examples.
_OF_USERS = {"fit_conductivity.py", "test_NAME.py", "train.py"}
_FILE = re.compile(r"^[\w.]+\.(?:py|c|cu|h|sh)$")
_PATH = re.compile(
    r"(?<![\w/.$~-])([a-z_]+(?:/[\w.]+)*/(?:[\w.]+\.(?:py|c|cu|md|sh))?)$"
)
_NAME = re.compile(r"^(?:hs|hpcstrat)((?:\.[A-Za-z_]\w*)+)(?:\(.*)?$")


def _quoted(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    missing = [word for word in _quoted(page) if not _is_there(word)]
    assert not missing, f"{page.relative_to(ROOT)} names what is not there: {missing}"


def _is_there(word: str) -> bool:
    if path := _PATH.match(word):
        return _is_somewhere(path[1])
    if _FILE.match(word):
        return word in _OF_USERS or _is_somewhere(word)
    name = _NAME.match(word)
    return name is None or _exists(name[1][1:].split("."))


@cache
def _paths() -> str:
    """Return the paths of all files and folders as one text, one path per line."""
    folders = ("hpcstrat", "docs", "tests", "jobs", "benchmarks", "packaging")
    every = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    every += ROOT.iterdir()
    return "".join(f"/{p.relative_to(ROOT)}{'/' * p.is_dir()}\n" for p in every)


def _is_somewhere(path: str) -> bool:
    """Return whether the repository has a path, perhaps without its first folders."""
    return path in _OF_PROGRAMS or f"/{path}\n" in _paths()


def _exists(parts: list[str]) -> bool:
    import hpcstrat

    value: object = hpcstrat
    for number, part in enumerate(parts):
        if not hasattr(value, part):
            try:
                name = ".".join(["hpcstrat", *parts[: number + 1]])
                value = importlib.import_module(name)
            except ModuleNotFoundError as error:
                return not (error.name or "").startswith("hpcstrat")
            except ImportError:
                # A framework that the integration needs is not installed.
                return True
        else:
            value = getattr(value, part)
    return True


# Pages that name classes, methods and functions of the library, and their modules.
DEVELOPERS = [
    page
    for page in PAGES
    if page.name.startswith("recipe")
    or page.name in {"architecture.md", "contributing.md", "tests.md"}
]
_MEMBER = re.compile(r"^([A-Z][a-z]\w*)\.(\w+)")
_SUFFIXES = {"c", "cu", "h", "json", "md", "py", "sh", "toml"}
_IN_MODULE = re.compile(r"^((?:[a-z_]+/)*[a-z_]+)\.([A-Za-z_]\w*)$")
# A name with its module in brackets, or a path in a table with names after it.
_BESIDE = re.compile(r"`([A-Z][a-z]\w*(?:\.\w+)?)`\s\(`([\w/]+\.py)`")
_ROW = re.compile(r"^\| `(hpcstrat/[\w/]+\.py)`,([^|]*)\|", re.MULTILINE)


@cache
def _definitions() -> dict[str, dict[str, set[str]]]:
    """Return the names that each module defines, with the members of each class."""
    found: dict[str, dict[str, set[str]]] = {}
    for path in (ROOT / "hpcstrat").rglob("*.py"):
        names = found[str(path.relative_to(ROOT))] = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {f"({ast.unparse(base)})" for base in node.bases}
                names[node.name] = bases.union(*map(_names_of, ast.walk(node)))
            for name in _names_of(node):
                names.setdefault(name, set())
    for path in (ROOT / "hpcstrat").rglob("*.c"):
        text = path.read_text()
        methods = set(re.findall(r'^    \{"(\w+)", ', text, re.MULTILINE))
        classes = re.findall(r'^static PyType_Spec .*"[\w.]+\.(\w+)"', text, re.M)
        found[str(path.relative_to(ROOT))] = dict.fromkeys(classes, methods)
    return found


def _names_of(node: ast.AST) -> set[str]:
    """Return the name that a statement or ``self.NAME`` defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    return set()


def _defines(path: str, name: str) -> bool:
    """Return whether a module defines a name, or a class in it (or a base) a member."""
    first, _, member = name.partition(".")
    modules = [names for p, names in _definitions().items() if f"/{p}".endswith(path)]
    classes = [names[first] for names in modules if first in names]
    return bool(classes) and (not member or any(map(_has(member), classes)))


def _has(member: str) -> Callable[[set[str]], bool]:
    def has(members: set[str]) -> bool:
        bases = [re.sub(r".*[.(]|\)|\[.*", "", m) for m in members if m[0] == "("]
        return member in members or any(_defines("", f"{b}.{member}") for b in bases)

    return has


def _misplaced(text: str) -> list[str]:
    """Return the names that are not where a page says."""
    quoted = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    places = [("", word.partition("(")[0]) for word in quoted if _MEMBER.match(word)]
    for word in quoted:
        found = _IN_MODULE.match(word)
        if found and found[2] not in _SUFFIXES and found[1] != "strategy":
            path = f"/{found[1]}.py"
            if any(f"/{module}".endswith(path) for module in _definitions()):
                places.append((path, found[2]))
    places += [(f"/{path}", name) for name, path in _BESIDE.findall(text)]
    for path, names in _ROW.findall(text):
        places += [(f"/{path}", name) for name in re.findall(r"`([\w.]+)`", names)]
    return [f"{name} {path}" for path, name in set(places) if not _defines(path, name)]


@pytest.mark.parametrize("page", DEVELOPERS, ids=lambda page: page.name)
def test_what_a_page_names_is_where_it_says(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    assert _misplaced(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "`Collectives.batch_reduce` (`engine/calls/reductions.py`)",
        "`engine/algorithms/slices.Pool`",
        "`Kernel.repeat_all`",
        "| `hpcstrat/data/files/rows.py`, `FileRows` to `closed` | 5 | |",
        "| `hpcstrat/data/files/rows.py`, `BlockColumn` | 5 | |",
    ],
)
def test_a_name_that_is_elsewhere_is_found(text: str) -> None:
    assert len(_misplaced(text)) == 1
