"""Registers `Noted` for ``pytest -p tests.reach.plugin``."""

from __future__ import annotations

import pytest

from tests.reach.noted import Noted

__all__ = ["pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Record the calls of tests."""
    config.pluginmanager.register(Noted())
