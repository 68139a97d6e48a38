"""The time at which the command ``hpcstrat`` began to import its modules."""

import time

BEGAN = time.time()
"""Seconds since 1970; the interpreter had started, and no other module was imported."""
