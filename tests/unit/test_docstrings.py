"""Public docstrings have numpydoc sections; private docstrings are short."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.public import is_installed, public_definitions

PACKAGE = Path(__file__).parents[2] / "hpcstrat"
WHO_CALLS = re.compile(
    r"(Collective over |Logically collective over |Not collective\b)"
)
SECTION = re.compile(
    r"^(Parameters|Attributes|Returns|Yields|Raises|Notes|See Also)\n-{3,}$", re.M
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def _decorators(node: Definition) -> set[str]:
    """Return the last names of the decorators, such as property or setter."""
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return {d.attr if isinstance(d, ast.Attribute) else ast.unparse(d) for d in calls}


def _within(
    body: list[ast.stmt], module: str, prefix: str
) -> Iterator[tuple[tuple[str, str], Definition]]:
    for node in body:
        if isinstance(node, Definition):
            name = f"{prefix}{node.name}"
            yield (module, name), node
            inside = f"{name}." if isinstance(node, ast.ClassDef) else ""
            if inside:
                yield from _within(node.body, module, inside)


def _collect() -> Iterator[tuple[tuple[str, str], Definition]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(p for p in parts if p != "__init__")
        yield from _within(ast.parse(file.read_text()).body, module, "")


NODES = [(key, node) for key, node in _collect() if "overload" not in _decorators(node)]
PUBLIC = public_definitions()
SHOWN = [(PUBLIC[key], node) for key, node in NODES if key in PUBLIC]


def _docstring(node: ast.AST) -> str:
    return ast.get_docstring(node) or ""


def _is_function(node: ast.AST) -> bool:
    """Return whether this definition is a function with its own contract.

    Properties count as attributes, and setters share the docstring of the getter.
    """
    others = {"property", "cached_property", "setter"}
    return isinstance(node, Function) and not _decorators(node) & others


def _inherits(name: str, node: ast.AST) -> bool:
    """Return whether this definition inherits the docstring of an overridden one."""
    return not _docstring(node) and bool(inspect.getdoc(pydoc.locate(name)))


FUNCTIONS = [
    (name, node)
    for name, node in SHOWN
    if _is_function(node) and not _inherits(name, node)
]
DATACLASSES = [
    (name, node)
    for name, node in SHOWN
    if isinstance(node, ast.ClassDef)
    and "dataclass" in _decorators(node)
    and not any(getattr(part, "name", "") == "__init__" for part in node.body)
]


def _parameters(docstring: str) -> list[str]:
    """Return the names in the Parameters section."""
    found = re.search(
        r"^Parameters\n-+\n(.*?)(?=^\S[^\n]*\n---|\Z)", docstring, re.M | re.S
    )
    text = found.group(1) if found else ""
    lines = (line for line in text.splitlines() if line and not line.startswith(" "))
    names = (name for line in lines for name in line.partition(" :")[0].split(","))
    return [name.strip().lstrip("*") for name in names]


def test_what_the_reference_shows_is_found() -> None:
    assert len(FUNCTIONS) > 150
    assert len(DATACLASSES) > 10


def test_the_third_line_says_who_must_call() -> None:
    second = {name: _docstring(node).split("\n\n")[1:2] for name, node in FUNCTIONS}
    silent = [name for name, text in second.items() if not text]
    assert silent == [], "their docstrings are a summary only"
    others = {name: text[0] for name, text in second.items()}
    assert [name for name, text in others.items() if not WHO_CALLS.match(text)] == []


def _arguments(node: ast.AST) -> set[str]:
    assert isinstance(node, Function)
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
        if isinstance(node, Function)
        and node.returns is not None
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
        if isinstance(node, ast.ClassDef)
    }
    assert [f"{name}: {names}" for name, names in differ.items() if names] == []


def test_what_users_do_not_call_has_no_sections() -> None:
    assert [
        ".".join(key)
        for key, node in NODES
        # The reference's names of an integration are known only if its framework is
        # installed.
        if key not in PUBLIC
        and is_installed(f"{key[0]}.")
        and SECTION.search(_docstring(node))
    ] == []


def test_docstrings_begin_with_a_subject() -> None:
    """A module's docstring begins with search terms, not with a question."""
    questions = ("How", "What", "When", "Where", "Which", "Who", "Whose", "Why", "Of")
    root, first_words = PACKAGE.parent, {}
    for folder in (PACKAGE, root / "tests", root / "benchmarks"):
        for path in folder.rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            text = ast.get_docstring(tree) or "-"
            first_words[str(path)] = text.split()[0].replace("Whether", "Which")
    for key, node in NODES:
        first_words[".".join(key)] = (_docstring(node) or "-").split()[0]
    assert [name for name, word in first_words.items() if word in questions] == []
