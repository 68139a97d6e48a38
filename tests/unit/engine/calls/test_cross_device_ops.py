"""Methods that a subclass of CrossDeviceOps may override."""

from __future__ import annotations

import pytest

import hpcstrat as hs


def test_a_hook_that_nothing_would_call_is_refused() -> None:
    with pytest.raises(TypeError, match=r"reduce_implementation, .*never called"):
        type("Own", (hs.CrossDeviceOps,), {"_gather_implementation": print})


def test_subclass_that_chooses_is_accepted() -> None:
    class Own(hs.CrossDeviceOps):
        pass

    assert Own().describe() == "Own"
