"""Arrays of other GPU libraries as values of calls, at any number of ranks.

The tests need CuPy, or its stand-in on the path.
"""

from __future__ import annotations

import weakref
from typing import Any

import cupy
import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.engine.arrays.kinds import as_array

standin = getattr(cupy, "_standin", None)

needs_standin = pytest.mark.skipif(
    standin is None, reason="the host writes to memory that the GPU still reads"
)


class Foreign:
    """Another library's array, whose memory is reused once no reference exists.

    As in JAX, the memory is reused on the library's own streams, without waiting for a
    stream of the program.
    """

    def __init__(self, array: Any, refusal: Exception | None = None) -> None:
        self._array = array
        self._refusal = refusal
        self.dtype = f"foreign.{array.dtype}"

    def __dlpack_device__(self) -> Any:
        device: Any = self._array.__dlpack_device__()
        return device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        if self._refusal is not None:
            raise self._refusal
        return self._array.__dlpack__(stream=stream)


def _fleeting(number: float) -> Foreign:
    """Return a foreign array whose memory is filled with -1 once it is released."""
    array = cupy.full(1000, number, cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    lent = array[:]
    weakref.finalize(lent, array._host.fill, -1)
    return Foreign(lent)


@pytest.fixture
def late() -> Any:
    """Delay the stand-in's streams during a test."""
    assert standin is not None
    before = standin.longest_delay
    standin.longest_delay = 0.05
    yield
    standin.longest_delay = before


def _assert_all(array: Any, number: float) -> None:
    host = cupy.asnumpy(array)
    np.testing.assert_array_equal(host, np.full(host.shape, number, host.dtype))


@needs_standin
@pytest.mark.usefixtures("late")
def test_memory_of_others_is_kept_until_it_has_been_read(strategy: Any) -> None:
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        variable = hs.Variable(_fleeting(3), name="v")
    _assert_all(variable.value(), 3)
    variable.assign(_fleeting(4))
    _assert_all(variable.value(), 4)
    for number in (1, 2):
        total = strategy.reduce("sum", _fleeting(number), axis=None)
        _assert_all(total, number * size)
    _assert_all(strategy.reduce("sum", _fleeting(7), axis=0), 7000 * size)
    gathered = strategy.gather(_fleeting(5), axis=0)
    assert gathered.shape == (1000 * size,)
    _assert_all(gathered, 5)
    _assert_all(strategy.reduce("sum", [_fleeting(6)], axis=None)[0], 6 * size)
    loss = hs.compute_average_loss(_fleeting(8), global_batch_size=1000)
    np.testing.assert_allclose(float(loss), 8, rtol=1e-6)
    mean = hs.metrics.Mean()
    mean.update_state(_fleeting(9))
    assert float(mean.result()) == 9
    with strategy.scope():
        wide = hs.Variable(cupy.zeros(1000), name="wide")
        optimizer = hs.optimizers.SGD(1.0)

    def step() -> None:
        # This gradient is cast to the variable's type.
        optimizer.apply_gradients([(_fleeting(2), wide)])

    strategy.run(step)
    _assert_all(wide.value(), -2.0 * size)
    started = strategy.run(
        lambda: hs.get_replica_context().start_all_reduce("sum", _fleeting(3)).wait()
    )
    _assert_all(strategy.local_value(started), 3 * size)


def test_memory_of_others_goes_back_when_it_was_read(strategy: Any) -> None:
    array = cupy.ones(10)
    lent = array[::2]
    gone = []
    weakref.finalize(lent, gone.append, True)
    foreign = Foreign(lent)
    del lent
    total = strategy.reduce("sum", foreign, axis=None)
    view = as_array(foreign)[1:]
    del foreign
    _assert_all(total, strategy.num_replicas_in_sync)
    assert not gone
    _assert_all(view, 1)
    del view
    cupy.cuda.Device().synchronize()
    as_array(Foreign(cupy.ones(3)))
    assert gone


@pytest.mark.parametrize(
    "refusal",
    [
        BufferError("Can't export tensors that require gradient"),
        TypeError("Unsupported dtype. dtype code: 10"),
        NotImplementedError("CuPy does not support bfloat16 yet"),
    ],
    ids=["gradient", "type", "bfloat16"],
)
def test_what_cannot_be_shared_is_named(strategy: Any, refusal: Exception) -> None:
    foreign = Foreign(cupy.ones(3), refusal)
    expected = rf"CuPy can read, found .*Foreign of foreign\.float64: {refusal}; detach"
    for action in (
        lambda: strategy.reduce("sum", foreign, axis=None),
        lambda: hs.Variable(foreign),
    ):
        with pytest.raises(ValueError, match=expected):
            action()


def test_bfloat16_works_on_gpus(strategy: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if not _has_bfloat16():
        pytest.skip("CuPy has no bfloat16 before version 14")
    size = strategy.num_replicas_in_sync
    dtype = np.dtype(ml_dtypes.bfloat16)
    ones = cupy.ones(300, dtype)
    total = strategy.reduce("sum", Foreign(ones), axis=None)
    assert total.dtype == dtype
    _assert_all(total, size)
    _assert_all(strategy.gather(ones, axis=0), 1)
    with strategy.scope():
        variable = hs.Variable(cupy.full(300, 2, dtype), name="w")
        optimizer = hs.optimizers.SGD(0.5)

    def step() -> None:
        optimizer.apply_gradients([(Foreign(ones), variable)])

    strategy.run(step)
    assert variable.dtype == dtype
    _assert_all(variable.value(), 2 - 0.5 * size)
    host = variable.numpy()
    assert host.dtype == dtype
    variable.assign(host)
    _assert_all(cupy.from_dlpack(variable), 2 - 0.5 * size)


def _has_bfloat16() -> bool:
    return standin is not None or int(cupy.__version__.split(".")[0]) >= 14


def test_kept_results_go_where_memory_is_short(strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1 and standin is not None:
        pytest.skip("needs a reduction")
    pool = cupy.get_default_memory_pool()
    values = cupy.ones(1 << 20, cupy.float32)
    strategy.reduce("sum", values, axis=None)
    other = cupy.ones(values.size + 1, cupy.float32)
    before = pool.get_limit()
    pool.set_limit(size=pool.used_bytes() + other.nbytes // 2)
    try:
        total = strategy.reduce("sum", other, axis=None)
    finally:
        pool.set_limit(size=before)
    _assert_all(total, strategy.num_replicas_in_sync)
