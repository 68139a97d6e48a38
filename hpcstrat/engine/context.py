"""The stack of contexts: the current strategy, and replica or cross-replica context.

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
    "ActiveContext",
    "AnnouncesInitErrors",
    "CurrentStrategy",
    "current",
    "own_index",
    "pop",
    "push",
]


class CurrentStrategy(Replicas, Protocol):
    """The members of a strategy that values, variables and lower modules may use.

    The lower modules cannot import the class Strategy, because its module imports them.
    `hpcstrat.strategies.Strategy` documents each member, and who must call it.
    """

    @property
    def device(self) -> str: ...

    @property
    def is_default(self) -> bool: ...

    # A `Meetings` object if there are logical replicas; None if not.
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

    # `Any`, because the module of variables imports this module.
    def variable_made(self, variable: Any) -> None: ...

    def all_or_none(self, variable: Any, what: str) -> AbstractContextManager[None]: ...


class ActiveContext:
    """One level of the stack: the current strategy, and the kind of context."""

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
        # The running replica's index among this rank's replicas; None if all or none
        # run.
        self.index = index
        # The replica context inside `run`; None in cross-replica context.
        self.replica_context = replica_context
        # True inside `extended.update`, where variables act on their own component.
        self.updating = updating
        # True if `experimental_set_strategy`, not a `with` block, has set the strategy.
        self.is_base = is_base


_stack: ContextVar[ActiveContext | None] = ContextVar("hpcstrat_context", default=None)

# An alias instead of a function, because every call uses it and a function costs time.
current = _stack.get
"""Return the innermost `ActiveContext`, or None outside of all contexts."""


def push(active: ActiveContext | None) -> Token[ActiveContext | None]:
    """Push a level, or None for an empty stack; return the argument for `pop`."""
    return _stack.set(active)


def pop(token: Token[ActiveContext | None]) -> None:
    """Restore the stack as it was before the call of `push` that returned ``token``."""
    _stack.reset(token)


def own_index() -> int | None:
    """Return the index of the running replica of this rank; None if none runs alone."""
    active = _stack.get()
    return None if active is None else active.index


class AnnouncesInitErrors:
    """Base class of objects that all replicas make: if one replica fails, all raise.

    Every error of ``__init__``, such as a wrong argument, makes all replicas raise.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the constructor of a subclass, so that it reports its errors."""
        super().__init_subclass__(**options)
        # An inherited constructor is wrapped already.
        if "__init__" in vars(cls):
            cls.__init__ = _announcing(cls.__init__)  # type: ignore[method-assign]


def _announcing(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_together(self: Any, *args: Any, **options: Any) -> None:
        try:
            initialize(self, *args, **options)
        except Exception as error:
            active = current()
            if active is not None:
                name = getattr(self, "name", None)
                what = type(self).__name__ + (f" {name!r}" if name else "")
                # Without this report, the replicas whose constructors succeeded would
                # wait in the next call.
                active.strategy.collectives.fail(f"creation of {what}", error)
            raise

    return initialize_together


def second_strategy(found: Any) -> str:
    """Return the end of an error message about an object of another strategy."""
    return (
        f"found it in the scope of a second strategy object, {found!r}; each call of a "
        "strategy's class makes a new strategy: make one, and pass it on"
    )
