"""The decorator of TensorFlow's graphs, which has nothing to do here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from hpcstrat.engine.logs import get_logger

__all__ = ["function"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


_EXPERIMENTAL = frozenset(
    f"experimental_{word}"
    for word in (
        "implements",
        "autograph_options",
        "attributes",
        "relax_shapes",
        "compile",
        "follow_type_hints",
    )
)


@overload
def function(
    func: _Function,
    input_signature: Any = ...,
    autograph: bool = ...,
    jit_compile: bool | None = ...,
    reduce_retracing: bool = ...,
    **experimental: Any,
) -> _Function: ...


@overload
def function(
    func: None = ...,
    input_signature: Any = ...,
    autograph: bool = ...,
    jit_compile: bool | None = ...,
    reduce_retracing: bool = ...,
    **experimental: Any,
) -> Callable[[_Function], _Function]: ...


def function(
    func: Any = None,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    **experimental: Any,
) -> Any:
    """Return the function as it is: there are no graphs.

    Not collective. In place of ``tf.function``, so that programs keep their decorators;
    all other arguments are ignored, and named in one line of the log at level DEBUG.

    Parameters
    ----------
    func : callable, optional
        The function; without it, a decorator is returned.
    input_signature : object, optional
        Not used.
    autograph : bool
        Not used.
    jit_compile : bool, optional
        Not used.
    reduce_retracing : bool
        Not used.
    **experimental : object
        Not used: ``experimental_...``, as tf.function has them.

    Returns
    -------
    callable
        The function itself, or a decorator that returns it.

    Raises
    ------
    TypeError
        For what cannot be called, and for an argument that tf.function has not.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> @hs.function(jit_compile=True)
    ... def double(x):
    ...     return 2 * x
    >>> double(3)
    6
    """
    unknown = sorted(experimental.keys() - _EXPERIMENTAL)
    if unknown:
        raise TypeError(
            f"expected arguments of tf.function, found {', '.join(unknown)}; leave "
            "them out"
        )
    given = {
        "input_signature": input_signature is not None,
        "autograph": not autograph,
        "jit_compile": jit_compile is not None,
        "reduce_retracing": reduce_retracing,
        **dict.fromkeys(experimental, True),
    }
    ignored = [name for name, is_given in given.items() if is_given]
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
