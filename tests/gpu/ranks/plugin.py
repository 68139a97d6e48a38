"""A pytest plugin: the rank tests get arrays on GPUs where they make NumPy's."""

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
        # As the strategies choose, but before the first array is made.
        number = local_rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(number).use()
        # Where the tests name no device, programs on GPUs would.
        OneDeviceStrategy.__init__.__defaults__ = (f"GPU:{number}",)

    def pytest_configure(self) -> None:
        """Come before pytest's own finder, which is there now."""
        instead = {"numpy": DeviceNumpy(), "pytest": DevicePytest()}
        sys.meta_path.insert(0, Importer(_HELPERS, instead, _adapt))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what arrays on GPUs have no meaning for."""
        for item in items:
            reason = reason_of(item.nodeid)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _adapt(module: ModuleType) -> None:
    """Change what CuPy cannot do in a module."""
    for name in TYPE_LISTS:
        if hasattr(module, name):
            setattr(module, name, _kept(getattr(module, name)))
    changes: dict[str, Any] = CHANGED.get(module.__name__.rpartition(".")[2], {})
    for name, change in changes.items():
        setattr(module, name, change(module, getattr(module, name)))


def _kept(value: Any) -> Any:
    """Return a list of types without those that CuPy does not have."""
    if isinstance(value, dict):
        return {key: _kept(types) for key, types in value.items()}
    return type(value)(dtype for dtype in value if has_type(dtype))
