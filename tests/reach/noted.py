"""A plugin of pytest that notes which functions of the library each test file calls.

It is loaded where NOTED_CALLS names a folder: there each process writes a file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

__all__ = ["VARIABLE", "Noted"]

VARIABLE = "NOTED_CALLS"
_ROOT = Path(__file__).parents[2]
_LIBRARY = f"{_ROOT / 'hpcstrat'}{os.sep}"


def _processor_seconds() -> float:
    """Return the time of this process and of those that it waited for.

    That of the clock depends on what else the machine does.
    """
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


class Noted:
    """Notes calls, of this process, for each test file."""

    def __init__(self) -> None:
        # By id: to hash a code object takes longer than most calls.
        self._codes: dict[int, CodeType] = {}
        self._reached: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Note what one test calls."""
        self._codes = {}
        begin = _processor_seconds()
        # Unlike a profiler, a tracer that traces no lines sees calls of Python only.
        threading.settrace(self._note)
        sys.settrace(self._note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            name = os.fspath(Path(item.path).relative_to(_ROOT))
            self._seconds[name] += _processor_seconds() - begin
            # Threads that a test has left may still call.
            codes, self._codes = self._codes, {}
            self._reached[name] |= {
                f"{os.path.relpath(code.co_filename, _ROOT)}:{code.co_qualname}"
                for code in list(codes.values())
                if code.co_filename.startswith(_LIBRARY)
            }

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        del event, argument
        self._codes[id(frame.f_code)] = frame.f_code

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        folder = os.environ.get(VARIABLE)
        if folder and self._reached:
            found = {
                name: [self._seconds[name], sorted(functions)]
                for name, functions in self._reached.items()
            }
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found))
