"""Memory of results is reused, but only when no array refers to it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcstrat.engine.arrays.recycling import Recycler

KIB = 1 << 10


def test_memory_that_nobody_holds_is_used_again() -> None:
    recycler = Recycler()
    addresses = set()
    for _ in range(5):
        array = recycler.empty((100, 100), np.dtype(np.float64))
        addresses.add(array.ctypes.data)
        assert array.shape == (100, 100)
        assert array.dtype == np.float64
        assert array.flags.carray
        assert array.ctypes.data % 64 == 0
        del array
    assert len(addresses) == 1


def test_any_view_keeps_memory_from_being_used_again() -> None:
    recycler = Recycler()
    holders = [
        lambda a: a[5:7],
        lambda a: a.reshape(10, -1).T,
        memoryview,
        lambda a: a.view(np.uint8)[::3],
        lambda a: np.frombuffer(a, np.uint8),
        lambda a: {"deep": [a[None]]},
    ]
    for hold in holders:
        array = recycler.empty((10_000,), np.dtype(np.float64))
        address, held = array.ctypes.data, hold(array)
        del array
        other = recycler.empty((10_000,), np.dtype(np.float64))
        assert other.ctypes.data != address
        del held, other


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 4 * KIB, 40 * KIB, 100 * KIB]), st.integers(0, 4)
        ),
        max_size=40,
    )
)
def test_arrays_that_live_never_share_memory(steps: list[tuple[int, int]]) -> None:
    recycler = Recycler(limit_bytes=300 * KIB)
    alive: list[tuple[int, np.ndarray]] = []
    for number, (size, forget) in enumerate(steps):
        array = recycler.empty((size,), np.dtype(np.uint8))
        array[:] = number
        alive.append((number, array))
        del array
        if forget < len(alive):
            del alive[forget]
        assert recycler._kept_bytes <= 300 * KIB
        assert recycler._kept_bytes == sum(
            size * len(blocks) for size, blocks in recycler._blocks.items()
        )
        assert all((kept == value).all() for value, kept in alive)


def test_no_more_memory_is_kept_than_the_limit() -> None:
    recycler = Recycler(limit_bytes=100 * KIB)
    held = [recycler.empty((40 * KIB,), np.dtype(np.uint8)) for _ in range(5)]
    assert len({array.ctypes.data for array in held}) == 5
    assert recycler._kept_bytes == 80 * KIB
    recycler.empty((90 * KIB,), np.dtype(np.uint8))
    assert recycler._kept_bytes == 90 * KIB
    assert recycler.empty((200 * KIB,), np.dtype(np.uint8)).base is None
