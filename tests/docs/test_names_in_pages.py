"""Paths and dotted names in back quotes, in README and pages, exist."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Folders that an example program creates.
_OF_PROGRAMS = {"logs/", "runs/"}
# Files of users, which pages name as examples.
_OF_USERS = {"test_NAME.py", "train.py"}
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
