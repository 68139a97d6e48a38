"""A stand-in for the decorator ``tf.function``; the stand-in compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from hpcstrat.engine.logs import get_logger

__all__ = ["function"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The arguments of tf.function, with their defaults.
_DEFAULTS = {"autograph": True, "jit_compile": None, "reduce_retracing": False} | {
    f"experimental_{word}": ...
    for word in (
        "implements",
        "autograph_options",
        "attributes",
        "relax_shapes",
        "compile",
        "follow_type_hints",
    )
}


@overload
def function(
    func: _Function, input_signature: Any = ..., **options: Any
) -> _Function: ...


@overload
def function(
    func: None = ..., input_signature: Any = ..., **options: Any
) -> Callable[[_Function], _Function]: ...


def function(func: Any = None, input_signature: Any = None, **options: Any) -> Any:
    """Return the function unchanged, because hpcstrat compiles no graphs.

    Not collective. ``hs.function`` replaces ``tf.function``, so that programs can keep
    their decorators. All other arguments are ignored; those that differ from the
    defaults of ``tf.function`` are logged in one line, at level DEBUG.

    Parameters
    ----------
    func : callable, optional
        The function; if it is left out, a decorator is returned.
    input_signature : object, optional
        Not used.
    **options : object
        Not used: the other arguments of ``tf.function``, by name.

    Returns
    -------
    callable
        The function itself, or a decorator that returns it.

    Raises
    ------
    TypeError
        If ``func`` cannot be called, or for an option that tf.function does not have.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> @hs.function(jit_compile=True)
    ... def double(x):
    ...     return 2 * x
    >>> double(3)
    6
    """
    unknown = sorted(options.keys() - _DEFAULTS.keys())
    if unknown:
        raise TypeError(
            f"expected arguments of tf.function, found {', '.join(unknown)}; leave "
            "them out"
        )
    ignored = [n for n, value in _DEFAULTS.items() if options.get(n, value) != value]
    if input_signature is not None:
        ignored.insert(0, "input_signature")
    if ignored:
        get_logger("function").debug(
            "hs.function compiles nothing, and ignores %s", ", ".join(ignored)
        )
    return _same if func is None else _same(func)


def _same(func: Any) -> Any:
    if not callable(func):
        raise TypeError(
            f"expected a function to decorate, found {func!r:.80}; pass options of "
            "tf.function by name"
        )
    return func
