"""``import hpcstrat`` is fast, and every public name is imported on first use."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpcstrat

HEAVY = {"mpi4py.MPI", "h5py", "cupy", "torch", "jax", "matplotlib", "tensorflow"}


def _run(program: str) -> str:
    """Run a program in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Loading MPI crashes Python on many login nodes; other modules cost seconds.
@pytest.mark.parametrize(
    ("module", "allowed"),
    [("hpcstrat", set()), ("hpcstrat.testing", set()), ("hpcstrat.cli", {"h5py"})],
)
def test_import_loads_nothing_heavy(module: str, allowed: set[str]) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(_run(program)))
    assert loaded & HEAVY <= allowed


def test_import_leaves_the_import_system_as_it_is() -> None:
    _run(
        "import sys\n"
        "before = [*sys.meta_path], [*sys.path_hooks]\n"
        "import hpcstrat\n"
        "assert (sys.meta_path, sys.path_hooks) == before, sys.meta_path"
    )


def test_import_in_a_job_of_several_ranks_loads_nothing_heavy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("SIZE", "2"), ("RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", f"test_imports {os.getpid()}")
    program = (
        "import json, sys, hpcstrat, threading\n"
        "from hpcstrat.safety import presence\n"
        "assert presence.own_registry() is not None\n"
        "presence.own_registry().num_local = None\n"
        "assert threading.active_count() == 1\n"
        "assert sys.excepthook is not sys.__excepthook__\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    assert not set(json.loads(_run(program))) & (HEAVY | {"numpy"})


def test_every_public_name_resolves() -> None:
    # Use a fresh interpreter, in which no earlier import has loaded the lazy names.
    program = (
        "import hpcstrat as hs\n"
        "missing = [n for n in hs.__all__ if getattr(hs, n, None) is None]\n"
        "assert not missing, missing\n"
    )
    _run(program)


def test_dir_lists_every_public_name() -> None:
    assert set(hpcstrat.__all__) <= set(dir(hpcstrat))


def test_public_names_are_listed_once() -> None:
    assert len(set(hpcstrat.__all__)) == len(hpcstrat.__all__)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        hpcstrat.no_such_name  # noqa: B018


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    # The TYPE_CHECKING block and the table must list the same names.
    tree = ast.parse(Path(hpcstrat.__file__).read_text())
    blocks = [n for n in tree.body if isinstance(n, ast.If)]
    seen = set()
    for node in (statement for block in blocks for statement in block.body):
        if isinstance(node, ast.ImportFrom):
            seen |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            seen |= {ast.unparse(target) for target in node.targets}
    assert [name for name in hpcstrat.__all__ if name not in seen] == []


def test_no_module_names_integrations_in_layers_below_them() -> None:
    """Import-linter sees imports, but no names that are imported at run time."""
    here = Path(hpcstrat.__file__).parent
    layers = ("cli", "tools", "testing", "integrations")
    # It looks for a module of an integration that the program has loaded.
    looks_only = "engine/logical/threads.py"
    found = [
        path.relative_to(here)
        for path in here.rglob("*.py")
        if path != here / looks_only
        if path.parent != here and path.relative_to(here).parts[0] not in layers
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith("hpcstrat.integrations.")
    ]
    assert found == []


def test_at_the_door_are_few_names() -> None:
    here = Path(hpcstrat.__file__).parent
    names = [path.name for path in here.iterdir() if path.name[0] not in "_."]
    assert len(names) <= 21, sorted(names)  # The package must contain py.typed.
