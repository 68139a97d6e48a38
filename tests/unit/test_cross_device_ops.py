"""Methods that a subclass of CrossDeviceOps may define."""

from __future__ import annotations

import pytest

import hpcstrat as hs


@pytest.mark.parametrize(
    "hook",
    [
        "reduce_implementation",
        "batch_reduce_implementation",
        "broadcast_implementation",
    ],
)
def test_hooks_that_nothing_would_call_are_refused(hook: str) -> None:
    with pytest.raises(TypeError, match=f"{hook} of tf.distribute.*override choose"):
        type("Own", (hs.CrossDeviceOps,), {hook: lambda self, *values: values})


def test_subclass_that_chooses_is_accepted() -> None:
    class Own(hs.CrossDeviceOps):
        pass

    assert Own().describe() == "Own"
