"""The names of hpcstrat in tables for newcomers exist, and accept the arguments."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import hpcstrat as hs
from hpcstrat.strategies.replica_context import ReplicaContext

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in (DOCS / "coming-from").glob("*.md"))
# The objects for names in the tables; for instances, their classes.
KNOWN: dict[str, Any] = {
    "hs": hs,
    "strategy": hs.MultiWorkerMirroredStrategy,
    "context": ReplicaContext,
    "checkpoints": hs.CheckpointManager,
}
INTEGRATIONS = {"hst": "torch", "hsj": "jax", "hsk": "keras"}
# Properties and attributes, and the types of their values.
RETURNS = {
    "strategy.topology": hs.Topology,
    "strategy.extended": importlib.import_module(
        "hpcstrat.strategies.extended"
    ).StrategyExtended,
    "hs.get_replica_context()": ReplicaContext,
}
# Attributes of instances only, and names of other libraries.
OF_INSTANCES = {
    "strategy.topology.replica_comm",
    "strategy.topology.worker_comm",
    "strategy.replica_id",
    "strategy.topology.worker_id",
}


def _spans(name: str) -> list[str]:
    """Return the code in the second column of the tables of a page."""
    rows = re.findall(r"^\|(.*)\|$", (DOCS / "coming-from" / name).read_text(), re.M)
    columns = [re.split(r"(?<!\\)\|", row) for row in rows]
    return [
        span for row in columns for span in re.findall(r"`([^`]+)`", " ".join(row[1:]))
    ]


def _resolve(node: ast.expr) -> Any:
    """Return the object of an expression of names and attributes; None if unknown."""
    text = ast.unparse(node)
    if text in RETURNS:
        return RETURNS[text]
    if isinstance(node, ast.Name):
        if node.id in INTEGRATIONS:
            library = INTEGRATIONS[node.id]
            if importlib.util.find_spec(library) is None:
                return None
            return importlib.import_module(f"hpcstrat.integrations.{library}")
        return KNOWN.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value)
        if owner is None or text in OF_INSTANCES:
            return None
        assert hasattr(owner, node.attr), f"{text} is not there"
        return getattr(owner, node.attr)
    return None


def _check_call(call: ast.Call) -> None:
    """Raise unless a call's arguments match the called object's parameters."""
    called = _resolve(call.func)
    if called is None or any(
        isinstance(part, ast.Constant) and part.value is ... for part in call.args
    ):
        return
    parameters = inspect.signature(called).parameters
    loose = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for keyword in call.keywords:
        if keyword.arg is not None:
            assert loose or keyword.arg in parameters, ast.unparse(call)


@pytest.mark.parametrize("name", PAGES)
def test_names_in_tables_are_there(name: str) -> None:
    found = 0
    for span in _spans(name):
        try:
            tree = ast.parse(span)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found += _resolve(node) is not None
            elif isinstance(node, ast.Call):
                _check_call(node)
    assert found or name in ("index.md", "lightning.md")
