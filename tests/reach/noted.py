"""A plugin of pytest that notes which functions of the library each test file calls.

It is loaded where NOTED_CALLS names a folder: there each process writes a file.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

__all__ = ["VARIABLE", "Noted"]

VARIABLE = "NOTED_CALLS"
_ROOT = Path(__file__).parents[2]
_LIBRARY = f"{_ROOT / 'hpcstrat'}{os.sep}"


class Noted:
    """Notes calls, of this process, for each test file."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._reached: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Note what one test calls."""
        self._codes = set()
        begin = time.monotonic()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            name = os.fspath(Path(item.path).relative_to(_ROOT))
            self._seconds[name] += time.monotonic() - begin
            # Threads that a test has left may still call.
            codes, self._codes = self._codes, set()
            self._reached[name] |= {
                f"{os.path.relpath(code.co_filename, _ROOT)}:{code.co_qualname}"
                for code in list(codes)
            }

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event == "call" and frame.f_code.co_filename.startswith(_LIBRARY):
            self._codes.add(frame.f_code)

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        folder = os.environ.get(VARIABLE)
        if folder and self._reached:
            found = {
                name: [self._seconds[name], sorted(functions)]
                for name, functions in self._reached.items()
            }
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(found))
