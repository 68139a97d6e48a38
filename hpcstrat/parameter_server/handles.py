"""Handles: pickled functions and values refer to objects of the cluster by handles.

A class whose objects are sent as handles has a method ``_handle``, which returns the
data for the other side. Only messages of the job's own communicator are unpickled.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from hpcstrat.engine.logs import place


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by value if they cannot be imported."""

    def persistent_id(self, obj: Any) -> Any:
        """Return the handle of an object, if it has one."""
        handle = getattr(type(obj), "_handle", None)
        return None if handle is None else handle(obj)


class _Unpickler(pickle.Unpickler):
    """Makes objects from handles."""

    def __init__(self, file: Any, resolve: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        """Return what a handle stands for, here."""
        return self._resolve(pid)


def pickled(value: Any) -> bytes:
    """Return a value in bytes."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def unpickled(data: bytes, resolve: Callable[[Any], Any]) -> Any:
    """Return the value of bytes; ``resolve`` returns the object for a handle."""
    return _Unpickler(io.BytesIO(data), resolve).load()


def error_bytes(error: BaseException) -> bytes:
    """Return an exception in bytes, with the place where it was raised; for
    `error_of`.
    """
    lines = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"raised on {place()}:\n{lines}")
    try:
        data = pickled(error)
    except Exception:
        data = b""
    return pickle.dumps((data, f"{type(error).__name__}: {error}\n{lines}"))


def error_of(data: bytes) -> Exception:
    """Return the exception of bytes, with None for each handle in it.

    A RuntimeError with the same text if it cannot be unpickled here.
    """
    whole, text = pickle.loads(data)
    # Some exceptions can be pickled, but not unpickled, or not on this host.
    with contextlib.suppress(Exception):
        error = unpickled(whole, lambda handle: None)
        if isinstance(error, Exception):
            return error
    return RuntimeError(text)
