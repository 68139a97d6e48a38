"""Search for the Python file of a program that ``hpcstrat torch`` or ``jax`` runs."""

from __future__ import annotations

import ast
import difflib
import os
import shutil
import sys
from importlib.machinery import PathFinder
from importlib.metadata import entry_points

__all__ = ["find_program", "require_statements"]

_FIRST_BYTES = 512
# If the path of Python is too long for a first line, pip writes a program of sh, whose
# second line starts Python with the same file.
_LONG_PATH = b"'''exec'"


def find_program(program: str) -> str:
    """Return the path of a Python program; ValueError if there is none.

    ``program`` is a path, or the name of a command in the folder of this environment's
    Python, or else on the PATH.
    """
    if os.path.isfile(program) or os.path.exists(os.path.join(program, "__main__.py")):
        return program
    folder = os.path.dirname(sys.executable)
    found = None
    if os.path.basename(program) == program:
        found = shutil.which(program, path=folder) or shutil.which(program)
    if found is None:
        raise ValueError(
            f"expected a program, found no file and no command {program!r}"
            f"{_similar(program, folder)}; give its path, the name of a command in "
            f"{folder} or on the PATH, or a module's name with -m"
        )
    with open(found, "rb") as file:
        first, _, rest = file.read(_FIRST_BYTES).partition(b"\n")
    if b"python" not in first and not rest.startswith(_LONG_PATH):
        raise ValueError(
            f"expected a command that is a Python program, found {found}, which is "
            "not; give the Python program that it starts, or a module's name with -m"
        )
    _require_own_python(found, first.decode(errors="replace"), folder)
    return found


def _similar(program: str, folder: str) -> str:
    names = difflib.get_close_matches(program, os.listdir(folder), 1)
    return f", but {names[0]}" if names else ""


def _require_own_python(found: str, first: str, folder: str) -> None:
    """Raise ValueError if a command belongs to another environment."""
    python = first.removeprefix("#!").strip().strip("\"'").split(" ")[0]
    if not python.startswith(os.sep) or os.path.basename(python) in ("env", "sh"):
        return
    if os.path.realpath(os.path.dirname(python)) != os.path.realpath(folder):
        raise ValueError(
            f"expected a command of the environment of {sys.executable}, found "
            f"{found} of {python}; install both into one environment"
        )


def require_statements(program: str, *, module: bool) -> None:
    """Raise ValueError if a program only defines functions, so that it does nothing."""
    path = _file_of_module(program) if module else program
    try:
        with open(path, "rb") as file:
            source = file.read()
        statements = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):
        # Python itself reports these errors, or the program is not a single file.
        return
    defines = any(isinstance(one, _DEFINITIONS) for one in statements)
    if defines and b"__main__" not in source and not any(map(_acts, statements)):
        name = program if module else os.path.basename(program)
        raise ValueError(
            f"expected a program, found that {name} only defines functions and "
            f"classes, so that it would do nothing; {_advice(program)}"
        )


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_QUIET = (*_DEFINITIONS, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


def _acts(statement: ast.stmt) -> bool:
    """Return whether a statement of a module does more than define names."""
    if isinstance(statement, ast.If | ast.Try):
        parts = [*statement.body, *statement.orelse]
        for handler in getattr(statement, "handlers", []):
            parts += handler.body
        return any(map(_acts, parts))
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(statement, (*_QUIET, ast.Pass, ast.Raise))


def _file_of_module(name: str) -> str:
    """Return the file that ``python -m NAME`` runs, without an import; maybe empty."""
    first, *others = name.split(".")
    spec = PathFinder.find_spec(first, [os.getcwd(), *sys.path])
    if spec is None:
        return ""
    for folder in spec.submodule_search_locations or ():
        place = os.path.join(folder, *others)
        for path in (os.path.join(place, "__main__.py"), f"{place}.py"):
            if os.path.isfile(path):
                return path
    return "" if others else spec.origin or ""


def _advice(program: str) -> str:
    """Return what to run instead of a module that only defines functions."""
    scripts = entry_points(group="console_scripts")
    names = [one.name for one in scripts if one.value.partition(":")[0] == program]
    if names:
        return f"run the command {' or '.join(names)}, which calls its functions"
    package = program.partition(".")[0]
    if package != program and _file_of_module(package).endswith("__main__.py"):
        return f"run -m {package}"
    return "add a call of its main function, below if __name__ == '__main__'"
