"""Patterns that tests of NVRTC search for in the code that NVRTC makes."""

from __future__ import annotations

import re

# An option that CuPy adds after the options that it receives.
ADDED = "-ftz=true"
FLUSHES = re.compile(r"\b(?:add|sub|mul|fma|div|sqrt|cvt)\S*\.ftz")
