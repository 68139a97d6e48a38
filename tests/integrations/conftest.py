"""Skips, with the reason, where a framework is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``framework("NAME")`` where NAME is not installed."""
    for mark in item.iter_markers("framework"):
        for name in mark.args:
            if find_spec(name) is None:
                pytest.skip(f"{name} is not installed")
