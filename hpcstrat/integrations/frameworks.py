"""Functions that several adapters share, such as checks of versions and strategies."""

from __future__ import annotations

import os
import re
import runpy
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcstrat.engine.call_sites import pass_over
from hpcstrat.engine.context import pop, push
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.engine.values import Adopted
from hpcstrat.strategies import Strategy
from hpcstrat.variables import Variable

__all__ = [
    "gradient_operation",
    "meeting_place",
    "refuse_logical_replicas",
    "require",
    "require_one_rank",
    "require_sums_each_step",
    "run_program",
    "variable_over",
]


def require_sums_each_step(strategy: Strategy, what: str) -> None:
    """Raise NotImplementedError if a strategy does not sum gradients in each step.

    Not collective; every rank raises the error, which names the feature ``what``.
    """
    if not strategy.sums_each_step:
        raise NotImplementedError(
            f"expected a strategy whose replicas are in sync for {what}, found "
            f"{strategy!r}; use MultiWorkerMirroredStrategy, or make the model "
            "outside of the scope"
        )


def require_one_rank(strategy: Strategy, what: str) -> None:
    """Raise NotImplementedError if replicas of a strategy have several ranks.

    Not collective; every rank raises the error, which names the feature ``what``.
    """
    if strategy.inside.size > 1:
        raise NotImplementedError(
            f"expected replicas of one rank for {what}, found {strategy.inside.size} "
            "ranks per replica; leave out ranks_per_replica"
        )


def gradient_operation(op: ReduceOp | str) -> ReduceOp:
    """Return the operation that combines gradients; ValueError if not SUM or MEAN."""
    parsed = ReduceOp.parse(op)
    if not parsed.adds:
        raise ValueError(
            f"expected SUM or MEAN to combine gradients, found {parsed.name}; pass one "
            "of the two"
        )
    return parsed


def refuse_logical_replicas(strategy: Strategy, what: str, advice: str) -> None:
    """Raise NotImplementedError if a strategy has logical replicas.

    Not collective; every rank raises the error, which names the feature ``what``.
    """
    if strategy.logical:
        raise NotImplementedError(
            f"expected one replica on each rank in {what}, found {strategy!r}, whose "
            f"ranks share {strategy.num_replicas_in_sync} logical replicas; {advice}"
        )


def require(name: str, least: str, distribution: str | None = None) -> None:
    """Raise ImportError if a library is missing or too old; do not import the library.

    After this call, messages that name a line of the program skip lines inside of the
    required library, and name the program's line that called the library.
    """
    distribution = distribution or name
    spec = find_spec(name)
    if spec is None:
        raise ImportError(
            f"expected {distribution} {least} or newer, found none; install it: "
            f"pip install '{distribution}>={least}'"
        )
    if spec.origin:
        pass_over(str(Path(spec.origin).parent))
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        # A library that is imported from its build folder has no version to check.
        return
    if _numbers(found) < _numbers(least):
        raise ImportError(
            f"expected {distribution} {least} or newer, found {found}; upgrade it: "
            f"pip install '{distribution}>={least}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers, such as ``(2, 4, 0)`` for ``2.4.0rc1+cpu``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def variable_over(
    value: Array,
    strategy: Strategy,
    name: str,
    *,
    trainable: bool,
    split: Any = None,
) -> Variable:
    """Return a variable that uses ``value``'s memory.

    The values must already be equal on all replicas. Not collective, except over the
    ranks of a replica if these divide the value, by ``split``.
    """
    token = push(strategy.cross_context)
    try:
        own = Adopted(value, is_equal=True)
        return Variable(own, trainable, name=name, split=split)
    finally:
        pop(token)


def meeting_place(collectives: Any, num_workers: int) -> tuple[str, int]:
    """Return the address of rank 0's host, and a free port on it, for a server there.

    Collective over the ranks of ``collectives``, which ``num_workers`` workers have.
    """
    place = None
    if collectives.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        place = "127.0.0.1" if num_workers == 1 else socket.gethostname(), port
    found: list[tuple[str, int]]
    found = collectives.all_gather_object(place, "address of the first rank")
    return found[0]


def run_program(kind: str, program: str, words: Sequence[str]) -> None:
    """Run a file as ``python FILE`` does, or a module as ``python -m`` does."""
    sys.argv = [program, *words]
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    # Python itself sets this path, so that a program can import from its own folder.
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")
