"""The stand-in's names and parameters, compared with CuPy's.

``check_describe`` runs with the stand-in; this file, run as a program, uses CuPy.
"""

import contextlib
import importlib
import inspect
import json
import re
import sys

MODULES = [
    "cupy",
    "cupy.cuda",
    "cupy.cuda.runtime",
    "cupy.cuda.memory",
    "cupy.cuda.pinned_memory",
    "cupy.cuda.stream",
    "cupy.cuda.device",
    "cupy.cuda.nvtx",
    "cupy.cuda.compiler",
    "cupy.cuda.nccl",
    "cupy.random",
    "cupy.linalg",
    "cupy.testing",
    "cupy.exceptions",
    "cupyx",
]


def _members(value):
    """Yield the public names that a class or module of the stand-in defines."""
    if inspect.isclass(value):
        for base in value.__mro__:
            if base.__module__.partition(".")[0] in {"cupy", "cupyx"}:
                yield from (name for name in vars(base) if not name.startswith("_"))
        return
    for name, found in vars(value).items():
        home = getattr(found, "__module__", None) or value.__name__
        if name.startswith("_") or inspect.ismodule(found):
            continue
        if home.startswith(("cupy", "numpy")) or isinstance(found, int | float):
            yield name


def _parameters(value):
    """Return a callable's parameters as name, kind and has-default, or None."""
    if (getattr(value, "__module__", None) or "").startswith("numpy"):
        return None
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return _documented(value)
    kinds = {"POSITIONAL_ONLY": "p", "POSITIONAL_OR_KEYWORD": "p", "KEYWORD_ONLY": "k"}
    return [
        [one.name, kinds.get(one.kind.name, "*"), one.default is not one.empty]
        for one in signature.parameters.values()
        if one.name != "self"
    ]


def _documented(value):
    """Return the parameters from the first docstring line, which Cython writes."""
    first = (getattr(value, "__doc__", None) or "").strip().partition("\n")[0]
    match = re.fullmatch(r"[\w.]+\((.*)\)(?: ->.*)?", first)
    if not match:
        return None
    found, kind = [], "p"
    for text in filter(None, match.group(1).replace("\\", "").split(", ")):
        if text.startswith("*"):
            if text != "*":
                found.append([text.strip("*"), "*", False])
            kind = "k"
        elif text not in {"self", "cls", "/"}:
            name, equals, _ = text.partition("=")
            found.append([name.strip().split()[-1], kind, bool(equals)])
    return found


def check_describe():
    import cupyx

    assert cupyx
    described = {}
    for module in MODULES:
        found = importlib.import_module(module)
        for name in _members(found):
            value = getattr(found, name)
            described[f"{module}:{name}"] = _parameters(value)
            if inspect.isclass(value) and value.__module__.startswith("cupy"):
                for member in _members(value):
                    own = getattr(value, member)
                    described[f"{module}:{name}.{member}"] = _parameters(own)
    print(json.dumps(described))


def _found(path):
    """Return CuPy's object with a name of the stand-in; raise if there is none."""
    module, _, names = path.partition(":")
    value = importlib.import_module(module)
    for name in names.split("."):
        value = getattr(value, name)
    return value


def _problem(path, own):
    """Return the problem of a name of the stand-in, or None."""
    try:
        value = _found(path)
    except AttributeError:
        return "CuPy has no such name"
    theirs = _parameters(value)
    if own is None or theirs is None or any(kind == "*" for _, kind, _ in theirs):
        return None
    if type(value).__name__ == "ufunc":
        # CuPy's ufuncs accept ``where``, although their documentation does not say it.
        own = [one for one in own if one[0] != "where"]
    return _difference(own, theirs)


def _difference(own, theirs):
    """Return a difference of parameters, or None; the stand-in may have fewer."""
    by_name = {name: default for name, _, default in theirs}
    order = [name for name, kind, _ in theirs if kind == "p"]
    mine = [name for name, kind, _ in own if kind == "p"]
    if mine != order[: len(mine)]:
        return f"positional parameters {mine}, CuPy's {order}"
    various = any(kind == "*" for _, kind, _ in own)
    for name, kind, default in own:
        if kind != "*" and name not in by_name:
            return f"CuPy has no parameter {name}"
        if kind != "*" and default and not by_name[name]:
            return f"CuPy requires {name}"
    missing = {name for name, default in by_name.items() if not default}
    missing -= {name for name, _, _ in own}
    return f"lacks {sorted(missing)}" if missing and not various else None


def compare():
    described = json.loads(sys.stdin.read())
    assert len(described) > 300
    skipped = set()
    problems = {}
    for path, own in described.items():
        module = path.partition(":")[0]
        if module == "cupy.cuda.nccl":
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
            if not hasattr(sys.modules.get(module), "NcclCommunicator"):
                skipped.add(module)
                continue
        problem = _problem(path, own)
        if problem:
            problems[path] = problem
    print(f"not compared: {sorted(skipped)}")
    lines = [f"{path}: {problem}" for path, problem in problems.items()]
    assert not lines, "\n".join(["", *lines])


if __name__ == "__main__":
    compare()
