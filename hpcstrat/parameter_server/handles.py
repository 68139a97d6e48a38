"""Handles: small tuples that replace strategy, variables and optimizers in pickles.

A class whose objects are pickled as handles has a method ``_handle``, which returns the
handle. The receiving rank replaces the handle by its own object. Because unpickling can
execute code, only messages from the job's own communicator are unpickled.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from hpcstrat.engine.logs import rank_on_host


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles objects as handles, and functions that cannot be imported by value."""

    def persistent_id(self, obj: Any) -> Any:
        """Return the handle of an object, or None if its class has no handles."""
        handle = getattr(type(obj), "_handle", None)
        return None if handle is None else handle(obj)


class _Unpickler(pickle.Unpickler):
    """Unpickles a value, and replaces each handle in it by this rank's object."""

    def __init__(self, file: Any, resolve: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        """Return the object of this rank that a handle identifies."""
        return self._resolve(pid)


def pickled(value: Any) -> bytes:
    """Return a value as bytes, with handles for objects whose class has `_handle`."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def unpickled(data: bytes, resolve: Callable[[Any], Any]) -> Any:
    """Return the value of pickled bytes; ``resolve`` returns the object of a handle."""
    return _Unpickler(io.BytesIO(data), resolve).load()


def error_bytes(error: BaseException) -> bytes:
    """Return an exception as bytes for `error_of`, with its traceback and host."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"raised on {rank_on_host()}:\n{lines}")
    try:
        data = pickled(error)
    except Exception:
        data = b""
    return pickle.dumps((data, f"{type(error).__name__}: {error}\n{lines}"))


def error_of(data: bytes) -> Exception:
    """Return the exception that `error_bytes` pickled, with None in place of handles.

    If this rank cannot unpickle the exception, return a RuntimeError with its text.
    """
    whole, text = pickle.loads(data)
    # Unpickling fails, for example, if this host lacks the module of the exception.
    with contextlib.suppress(Exception):
        error = unpickled(whole, lambda handle: None)
        if isinstance(error, Exception):
            return error
    return RuntimeError(text)
