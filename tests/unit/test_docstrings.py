"""Docstrings say who must call a function, and name the parameters that it has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hpcstrat"
FILES = sorted(PACKAGE.rglob("*.py"))
WHO_CALLS = re.compile(
    r"(Collective over |Logically collective over |Not collective\b)"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _decorators(node: Function | ast.ClassDef) -> set[str]:
    """Return the last words of the decorators, such as property or setter."""
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {d.attr if isinstance(d, ast.Attribute) else ast.unparse(d) for d in calls}


def _public(
    tree: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[str, ast.AST]]:
    """Yield the public functions, classes and methods; not those within functions."""
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        yield name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node, name)


def _collect() -> Iterator[tuple[str, ast.AST]]:
    for file in FILES:
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        tree = ast.parse(file.read_text())
        yield from _public(tree, ".".join(p for p in parts if p != "__init__"))


NODES = list(_collect())


def _is_function(node: ast.AST) -> bool:
    """Return whether this is a function with a contract of its own.

    Properties are attributes, overloads and the setter share one docstring, and that
    of a command is its help text.
    """
    others = {"property", "cached_property", "setter", "overload", "command", "group"}
    return isinstance(node, Function) and not _decorators(node) & others


def _parameters(docstring: str) -> list[str]:
    """Return the names in the section of parameters."""
    found = re.search(
        r"^Parameters\n-+\n(.*?)(?=^\S[^\n]*\n---|\Z)", docstring, re.M | re.S
    )
    text = found.group(1) if found else ""
    lines = (line for line in text.splitlines() if line and not line.startswith(" "))
    names = (name for line in lines for name in line.partition(" :")[0].split(","))
    return [name.strip().lstrip("*") for name in names]


# Not for users: one line says all that types and names do not.
INTERNAL = {"Breaks", "PatientComm", "collective", "Channel", "ProgressThread"}
FUNCTIONS = [
    (name, node)
    for name, node in NODES
    if _is_function(node) and not INTERNAL & set(name.split("."))
]
DATACLASSES = [
    (name, node)
    for name, node in NODES
    if isinstance(node, ast.ClassDef)
    and "dataclass" in _decorators(node)
    and not any(getattr(part, "name", "") == "__init__" for part in node.body)
]


def _docstring(node: ast.AST) -> str:
    return ast.get_docstring(node) or ""


def test_the_package_is_found() -> None:
    assert len(FUNCTIONS) > 50
    assert len(DATACLASSES) > 5


def test_the_third_line_says_who_must_call() -> None:
    second = {name: _docstring(node).split("\n\n")[1:2] for name, node in FUNCTIONS}
    silent = [name for name, text in second.items() if not text]
    assert silent == [], "their docstrings are a summary only"
    others = {name: text[0] for name, text in second.items()}
    assert [name for name, text in others.items() if not WHO_CALLS.match(text)] == []


def _arguments(node: Function) -> set[str]:
    a = node.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    return {argument.arg for argument in every if argument}


def test_documented_parameters_exist() -> None:
    unknown = {
        name: set(_parameters(_docstring(node))) - _arguments(node)
        for name, node in FUNCTIONS
    }
    assert [f"{name}: {names}" for name, names in unknown.items() if names] == []


def test_returned_values_are_described() -> None:
    nothing = {"None", "NoReturn", "Never"}
    assert [
        name
        for name, node in FUNCTIONS
        if node.returns is not None
        and ast.unparse(node.returns) not in nothing
        and not re.search(r"^(Returns|Yields)\n---", _docstring(node), re.M)
    ] == []


def _fields(node: ast.ClassDef) -> set[str]:
    """Return the public fields of a dataclass."""
    return {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(statement.annotation)
    }


def test_dataclasses_document_their_fields() -> None:
    differ = {
        name: set(_parameters(_docstring(node))) ^ _fields(node)
        for name, node in DATACLASSES
    }
    assert [f"{name}: {names}" for name, names in differ.items() if names] == []
