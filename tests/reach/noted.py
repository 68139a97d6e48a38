"""A pytest plugin that records the library functions that each test file calls.

The plugin is active if NOTED_CALLS names a folder, into which each process writes a
file.
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
    """Return the CPU seconds of this process and of its ended children.

    Clock seconds would depend on the load of the machine.
    """
    who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


class Noted:
    """Records the calls in this process for each test file."""

    def __init__(self) -> None:
        # Keyed by id, because hashing a code object takes longer than most calls.
        self._codes: dict[int, CodeType] = {}
        self._reached: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Record the calls of one test."""
        self._codes = {}
        begin = _processor_seconds()
        # Use a tracer without line events, which, unlike a profiler, skips calls of C
        # code.
        threading.settrace(self._note)
        sys.settrace(self._note)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            name = os.fspath(Path(item.path).relative_to(_ROOT))
            self._seconds[name] += _processor_seconds() - begin
            # Threads that a test has left running may still make calls.
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
        """Write the recorded calls."""
        folder = os.environ.get(VARIABLE)
        if folder and self._reached:
            found = {
                name: [self._seconds[name], sorted(functions)]
                for name, functions in self._reached.items()
            }
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found))
