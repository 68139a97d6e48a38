"""The code blocks of a page, and their runner: ``python -m tests.docs.page``.

The words after the language of a fenced block say where the block runs:

==================  ===================================================================
``python``          everywhere: in one process, and on two ranks if the page makes a
                    strategy on MPI
``python ranks``    on two ranks only
``python gpu``      with CuPy, in one process and on two ranks: see tests/gpu
``python torch``    where PyTorch is installed, in a run of the page of its own
``python jax``      where JAX is installed, likewise
``python keras``    where Keras is installed, likewise
``python dask``     where Dask is installed, likewise
``python equinox``  where Equinox is installed, likewise
``python joblib``   where joblib is installed, likewise
``python ulfm``     where a job lives on when a rank dies: on six ranks, in a run of the
                    page of its own
``python no-run``   nowhere; for what needs another library or machine: its first line
                    tells readers why
==================  ===================================================================

Blocks of other languages are not run. All blocks of a page that run share one
namespace. If a block makes a ParameterServerStrategy, serving ranks stay in that block
until the coordinator has finished it, and then the strategy is closed. For ``ulfm``,
the environment has the roles of such a strategy.

A comment after a block, which is invisible to readers, makes the page a *recipe*::

    <!-- compared: weights, loss -->

The expressions are evaluated after the block. Their values must be the same on any
number of ranks, and in one process without hpcstrat.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.cluster_resolver import launch_from_environment

__all__ = [
    "EXTRAS",
    "ULFM_SIZE",
    "WORDS",
    "Block",
    "blocks",
    "numbers_of",
    "run",
    "runnable",
]

_FENCE = re.compile(r"^( *)```+([^\n`]*)$")
_COMPARED = re.compile(r"^<!-- compared: (.*) -->$")
EXTRAS = ("torch", "jax", "keras", "dask", "joblib", "equinox")
ULFM_SIZE = 6
WORDS = {"", "ranks", "gpu", "ulfm", "no-run", *EXTRAS}
_SERVED = "ParameterServerStrategy"
_TASKS = ("chief", "ps", "ps", "worker", "worker", "worker")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block of a page.

    Parameters
    ----------
    line : int
        Number of its first line of code.
    language : str
        First word after the fence.
    where : str
        The words after the language.
    code : str
        The lines of code.
    compared : tuple of str
        Expressions whose values do not depend on the number of ranks.
    """

    line: int
    language: str
    where: str
    code: str
    compared: tuple[str, ...] = ()


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page; those inside lists lose their indentation."""
    found: list[Block] = []
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    indentation = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            language, _, where = fence.group(2).strip().partition(" ")
            opened, lines = (number + 1, language, where.strip()), []
            indentation = fence.group(1)
        elif fence and opened is not None:
            found.append(Block(*opened, "\n".join(lines) + "\n"))
            opened = None
        elif opened is not None:
            lines.append(line.removeprefix(indentation))
        elif compared := _COMPARED.match(line):
            tree = ast.parse(f"[{compared.group(1)}]", mode="eval").body
            expressions = tuple(map(ast.unparse, getattr(tree, "elts", ())))
            found[-1] = dataclasses.replace(found[-1], compared=expressions)
    return found


def runnable(page: Path, size: int, extra: str = "") -> list[Block]:
    """Return the blocks that run on this number of ranks, or for an extra word."""
    wanted = {"", "ranks", extra} if size == 2 else {"", extra}
    return [
        block
        for block in blocks(page.read_text())
        if block.language == "python" and block.where in wanted
    ]


def numbers_of(value: Any) -> list[float]:
    """Return a variable, an array, or a mapping of tensors as an array of numbers."""
    if isinstance(value, Mapping):
        return [number for key in value for number in numbers_of(value[key])]
    array = value.numpy() if hasattr(value, "numpy") else value
    return [float(number) for number in np.asarray(array).ravel()]


def run(page: Path, size: int, extra: str = "") -> dict[str, list[float]]:
    """Run a page's blocks in order; tracebacks show the page's own lines.

    Return the compared numbers, keyed by the blocks' words and expressions.
    """
    namespace = {"__name__": "__main__", "__file__": str(page)}
    numbers: dict[str, list[float]] = {}
    for block in runnable(page, size, extra):
        code = "\n" * (block.line - 1) + block.code
        try:
            exec(compile(code, str(page), "exec"), namespace)
        except SystemExit as end:
            if end.code or _SERVED not in block.code:
                raise
        if _SERVED in block.code and "strategy" in namespace:
            namespace.pop("strategy").close()
        for expression in block.compared:
            name = f"{block.where} {expression}".strip()
            numbers[name] = numbers_of(eval(expression, namespace))
    # Clear the namespace, because the next page must not use this page's variables.
    namespace.clear()
    gc.collect()
    return numbers


def main(folder: str, size: int, extra: str, pages: list[str]) -> None:
    """Run pages one after the other, each in a separate folder named by its number.

    After all blocks of a page have run, its folder has ``compared.json``.
    """
    if extra == "ulfm":
        os.environ["TASK"] = _TASKS[launch_from_environment().rank]
    for number, page in enumerate(pages):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        os.chdir(place)
        found = run(Path(page), size, extra)
        if launch_from_environment().rank == 0:
            Path("compared.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
