"""The one stack of contexts: which strategy is current, and on which side of it.

Threads that do not inherit the context see an empty stack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, Protocol

from hpcstrat.engine.options import ReduceOp, VariableOptions
from hpcstrat.engine.typing import Replicas, Tree

__all__ = [
    "AnnouncesInitErrors",
    "ContextEntry",
    "CurrentStrategy",
    "current",
    "own_index",
    "pop",
    "push",
]


class CurrentStrategy(Replicas, Protocol):
    """A strategy, as values, variables and its own less common methods see it.

    They all lie below it. `hpcstrat.strategies.Strategy` documents each member, and who
    must call it.
    """

    @property
    def device(self) -> str: ...

    @property
    def is_default(self) -> bool: ...

    # A `Meetings` with logical replicas; else None.
    @property
    def meetings(self) -> Any: ...

    @property
    def extended(self) -> Any: ...

    def scope(self) -> AbstractContextManager[Any]: ...

    def _require_cross(self, what: str) -> None: ...

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any: ...

    def reduce(
        self, reduce_op: ReduceOp | str, value: Tree, axis: Any = None
    ) -> Tree: ...

    def gather(self, value: Tree, axis: int) -> Tree: ...

    def experimental_local_results(self, value: Tree) -> tuple[Any, ...]: ...

    def variable_class(self, options: VariableOptions) -> Any: ...

    # Variables lie above this module.
    def variable_made(self, variable: Any) -> None: ...

    def all_or_none(self, variable: Any, what: str) -> AbstractContextManager[None]: ...


class ContextEntry:
    """One level of the stack: the current strategy, and on which side of it we are."""

    __slots__ = ("index", "is_base", "replica_context", "strategy", "updating")

    def __init__(
        self,
        strategy: CurrentStrategy,
        replica_context: Any = None,
        *,
        updating: bool = False,
        is_base: bool = False,
        index: int | None = None,
    ) -> None:
        self.strategy = strategy
        # The running replica's place among this rank's; None if all or none run.
        self.index = index
        # Inside `run`; None in cross-replica context.
        self.replica_context = replica_context
        # Inside `extended.update`: variables act on their own component.
        self.updating = updating
        # Set by `experimental_set_strategy`, not by a `with` block.
        self.is_base = is_base


_stack: ContextVar[ContextEntry | None] = ContextVar("hpcstrat_context", default=None)

# This is no function of its own, because every call uses it.
current = _stack.get
"""Return the innermost `ContextEntry`, or None outside everything."""


def push(entry: ContextEntry | None) -> Token[ContextEntry | None]:
    """Enter a level; None leaves everything. Return the argument for `pop`."""
    return _stack.set(entry)


def pop(token: Token[ContextEntry | None]) -> None:
    """Leave the level that `push` has entered."""
    _stack.reset(token)


def own_index() -> int | None:
    """Return which of this rank's replicas runs; None in cross-replica context."""
    entry = _stack.get()
    return None if entry is None else entry.index


class AnnouncesInitErrors:
    """Base class of objects made on all replicas in a scope: all learn if one fails.

    Every error of ``__init__``, also of a wrong argument, is announced to the others.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the constructor of a subclass announce its errors."""
        super().__init_subclass__(**options)
        # An inherited one announces already.
        if "__init__" in vars(cls):
            cls.__init__ = _announcing(cls.__init__)  # type: ignore[method-assign]


def _announcing(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_together(self: Any, *args: Any, **options: Any) -> None:
        try:
            initialize(self, *args, **options)
        except Exception as error:
            entry = current()
            if entry is not None:
                name = getattr(self, "name", None)
                what = type(self).__name__ + (f" {name!r}" if name else "")
                # Otherwise the replicas that have made theirs would wait in the next
                # call.
                entry.strategy.collectives.fail(f"creation of {what}", error)
            raise

    return initialize_together


def second_strategy(found: Any) -> str:
    """Return the end of a message about something that another strategy owns."""
    return (
        f"found it in that of a second strategy object, {found!r}; each call of a "
        "strategy's class makes another one: make it once, and pass it on"
    )
