"""A program as data: a list of operations, printed and parsed as Python calls."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Draw", "Op", "Program", "parse", "ranks_per_replica"]

_ODD = {"huge": 1e308, "half": 3e4, "nan": np.nan, "inf": np.inf}


@dataclass(frozen=True)
class Draw:
    """A reproducible random array, which differs between ranks.

    Values of style ``exact`` are small integers, or eighths if the type has fractions,
    so that sums are exact. Style ``rounding`` uses all bits. Other styles repeat one
    number.
    """

    key: int
    dtype: str
    shape: tuple[int, ...] = ()
    style: str = "exact"

    def value(self, rank: int, *, ragged: bool = False) -> Any:
        """Return this rank's array; ragged arrays have fewer rows, or none."""
        draw = np.random.default_rng([self.key, rank])
        shape = self.shape
        if ragged:
            shape = (int(draw.integers(0, shape[0] + 1)), *shape[1:])
        dtype = np.dtype(self.dtype)
        if self.style in _ODD:
            return np.full(shape, _ODD[self.style], dtype)
        if self.style == "rounding":
            return draw.normal(size=shape).astype(dtype)
        if dtype.kind in "iu":
            low = 0 if dtype.kind == "u" else -8
            return np.asarray(draw.integers(low, 9, shape)).astype(dtype)
        eighths = draw.integers(-32, 33, (2, *shape)) / 8
        whole = eighths[0] + 1j * eighths[1] if dtype.kind == "c" else eighths[0]
        return np.asarray(whole).astype(dtype)

    def __repr__(self) -> str:
        """Return the text that `parse` reads."""
        style = "" if self.style == "exact" else f", {self.style!r}"
        return f"draw({self.key}, {self.dtype!r}, {self.shape!r}{style})"


@dataclass
class Op:
    """One operation of a program; missing keywords are None."""

    kind: str
    args: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return the value of a keyword."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self.args.get(name)

    def __repr__(self) -> str:
        """Return the operation as text of a Python call."""
        words = ", ".join(f"{k}={v!r}" for k, v in self.args.items() if v is not None)
        return f"{self.kind}({words})"


@dataclass
class Program:
    """A program's operations in order: strategy, declarations, other operations."""

    ops: list[Op]
    title: str = ""

    def __str__(self) -> str:
        """Return the program as text, one line per operation and inner operation."""
        lines = [f"# {self.title}"] if self.title else []
        for op in self.ops:
            if not op.body:
                lines.append(repr(op))
                continue
            rest = {k: v for k, v in op.args.items() if k != "body" and v is not None}
            lines.append(f"{op.kind}(")
            lines += [f"    {name}={value!r}," for name, value in rest.items()]
            lines += ["    body=[", *(f"        {one!r}," for one in op.body), "    ],"]
            lines.append(")")
        return "\n".join(lines)

    def of(self, *kinds: str) -> list[Op]:
        """Return the operations of some kinds, including nested operations."""
        every = [one for op in self.ops for one in (op, *(op.body or ()))]
        return [op for op in every if op.kind in kinds]


def ranks_per_replica(op: Op, count: int) -> int:
    """Return how many of ``count`` ranks a replica has, for an operation that starts.

    It is 1 if the ranks cannot be divided as the program wants.
    """
    wanted = op.ranks_per_replica or 1
    return 1 if count % wanted else int(wanted)


def _built(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        if node.func.id == "draw":
            return Draw(*map(_built, node.args))
        return Op(node.func.id, {w.arg or "": _built(w.value) for w in node.keywords})
    if isinstance(node, ast.List):
        return [_built(one) for one in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_built(one) for one in node.elts)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_built(k): _built(v) for k, v in pairs if k is not None}
    return ast.literal_eval(node)


def parse(text: str) -> Program:
    """Parse the text of a program."""
    statements = ast.parse(text).body
    ops = [_built(one.value) for one in statements if isinstance(one, ast.Expr)]
    first = text.splitlines()[0]
    return Program(ops, first[2:] if first.startswith("# ") else "")
