"""Patterns that the tests of NVRTC look for in the code that it makes."""

from __future__ import annotations

import re

# By CuPy, behind the options that it is given.
ADDED = "-ftz=true"
FLUSHES = re.compile(r"\b(?:add|sub|mul|fma|div|sqrt|cvt)\S*\.ftz")
