"""A pytest plugin that gives rank tests CuPy arrays instead of NumPy arrays."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import cupy
import pytest

from hpcstrat.strategies.one_device import OneDeviceStrategy
from tests.gpu.ranks.arrays import DeviceNumpy, DevicePytest, has_type
from tests.gpu.ranks.exceptions import CHANGED, TYPE_LISTS, reason_of
from tests.gpu.ranks.importing import Importer

_HELPERS = (
    "dealing",
    "differing",
    "made_variables",
    "outcomes",
    "reference_rules",
    "regression",
    "saved",
    "sums",
)


class ArraysOnGpu:
    """The plugin; ``local_rank`` is this rank's number on its host."""

    def __init__(self, local_rank: int) -> None:
        # Choose the GPU like a strategy does, but before the first array is made.
        number = local_rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(number).use()
        # Tests without a device use this GPU by default, as programs on GPUs would.
        OneDeviceStrategy.__init__.__defaults__ = (f"GPU:{number}",)

    def pytest_configure(self) -> None:
        """Insert this finder before pytest's finder, which exists now."""
        instead = {"numpy": DeviceNumpy(), "pytest": DevicePytest()}
        sys.meta_path.insert(0, Importer(_HELPERS, instead, _adapt))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip tests that have no meaning with arrays on GPUs."""
        for item in items:
            reason = reason_of(item.nodeid)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _adapt(module: ModuleType) -> None:
    """Change the parts of a module that CuPy cannot run."""
    for name in TYPE_LISTS:
        if hasattr(module, name):
            setattr(module, name, _kept(getattr(module, name)))
    changes: dict[str, Any] = CHANGED.get(module.__name__.rpartition(".")[2], {})
    for name, change in changes.items():
        setattr(module, name, change(module, getattr(module, name)))


def _kept(value: Any) -> Any:
    """Return a list of types without the types that CuPy does not have."""
    if isinstance(value, dict):
        return {key: _kept(types) for key, types in value.items()}
    return type(value)(dtype for dtype in value if has_type(dtype))
