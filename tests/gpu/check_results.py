"""Memory of results of calls on GPUs, and calls that differ between ranks."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

import hpcstrat as hs

ELEMENTS = 1000


def _total(strategy: Any, number: float) -> Any:
    values = cupy.full(ELEMENTS, number, cupy.float32)
    return strategy.reduce("sum", values, axis=None)


def _assert_all(array: Any, number: float) -> None:
    np.testing.assert_array_equal(
        cupy.asnumpy(array), np.full(array.shape, number, np.float32)
    )


def test_memory_of_results_is_used_again(strategy: Any) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("nothing is reduced")
    addresses = {_total(strategy, 1).data.ptr for _ in range(5)}
    assert len(addresses) == 1


def test_held_results_are_left_alone(strategy: Any) -> None:
    size = strategy.num_replicas_in_sync
    total = _total(strategy, 1)
    view, part = total[None], total[:10]
    # cupy.lib.stride_tricks.as_strided makes arrays like this one.
    bare = cupy.ndarray((ELEMENTS,), cupy.float32, memptr=total.data)
    del total
    for number in (2, 3):
        _assert_all(_total(strategy, number), number * size)
        for kept in (view, part, bare):
            _assert_all(kept, size)
    del view, part
    _total(strategy, 4)
    _assert_all(bare, size)


def test_outs_that_share_memory_are_refused(strategy: Any) -> None:
    memory = cupy.zeros((ELEMENTS, 3), cupy.float32)
    value = [cupy.full(ELEMENTS, i, cupy.float32) for i in range(3)]
    outs = [memory[:, 1], memory[:, 0], memory[:, 2]]
    for found, number in zip(
        strategy.reduce("mean", value, axis=None, out=outs), range(3), strict=True
    ):
        _assert_all(found, number)
    memory = cupy.zeros(3 * ELEMENTS, cupy.float32)
    outs = [memory[i * ELEMENTS // 2 :][:ELEMENTS] for i in (0, 2, 3)]
    with pytest.raises(ValueError, match=r"out\[1\] and out\[2\] share memory"):
        strategy.reduce("mean", value, axis=None, out=outs)
    _assert_all(_total(strategy, 1), strategy.num_replicas_in_sync)


def test_results_with_another_shape_are_left_alone(strategy: Any) -> None:
    total = _total(strategy, 1)
    total.shape = (2, ELEMENTS // 2)
    del total
    assert _total(strategy, 1).shape == (ELEMENTS,)


def test_results_of_one_stream_are_left_to_it(strategy: Any) -> None:
    size = strategy.num_replicas_in_sync
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    sums = []
    for _ in range(10):
        with one:
            total = _total(strategy, 1)
            sums.append(total + 1)
            del total
        with other:
            _total(strategy, 5)
    with one:
        for added in sums:
            _assert_all(added, size + 1)


def test_implementations_that_differ_are_an_error_on_all(
    strategy: Any, job: Any
) -> None:
    if job.size == 1:
        pytest.skip("one rank agrees with itself")
    _total(strategy, 1)
    able = strategy.collectives.channel.device_group.capabilities
    if not (able.nccl and able.mpi_sendrecv):
        pytest.skip("needs two implementations")
    name = "NCCL" if job.rank else "RING"
    options = hs.CommunicationOptions(implementation=name)

    def step() -> Any:
        context = hs.get_replica_context()
        return context.all_reduce("sum", cupy.ones(3), options)

    with pytest.raises(hs.CollectiveError, match=r"NCCL[^$]*RING|RING[^$]*NCCL"):
        strategy.run(step)
    _assert_all(_total(strategy, 1), job.size)


def test_rows_that_come_twice_are_the_same_on_all(strategy: Any) -> None:
    with strategy.scope():
        variable = hs.Variable(cupy.zeros((3, 2), cupy.float32), name="table")
    rows = cupy.arange(8, dtype=cupy.float32).reshape(4, 2)
    variable.scatter_update(hs.IndexedSlices(rows, cupy.array([1, 0, 1, 1])))
    np.testing.assert_array_equal(variable.numpy(), [[2, 3], [6, 7], [0, 0]])
    variable.scatter_mul(hs.IndexedSlices(rows, cupy.array([1, 1, 0, 2])))
    np.testing.assert_array_equal(variable.numpy(), [[8, 15], [0, 21], [0, 0]])


def test_arrays_on_other_gpus_are_refused(strategy: Any) -> None:
    gpu = strategy.topology.gpu
    if strategy.num_replicas_in_sync == 1 or cupy.cuda.runtime.getDeviceCount() == 1:
        pytest.skip("needs several ranks and GPUs")
    other = (gpu.index + 1) % cupy.cuda.runtime.getDeviceCount()
    with cupy.cuda.Device(other):
        values = cupy.ones((7, 3))
    with pytest.raises(ValueError, match=f"rank's GPU:{gpu.index}.*GPU:{other}"):
        strategy.reduce("sum", values, axis=None)
    _assert_all(_total(strategy, 1), strategy.num_replicas_in_sync)


def test_arrays_on_gpus_are_compared(strategy: Any) -> None:
    replica = strategy.replica_id
    values = cupy.zeros((3, 4), cupy.float32)
    strategy.check_equal({"values": values, "on the host": np.ones(2)})
    if strategy.num_replicas_in_sync == 1:
        return
    values[1, 2] = replica == 1
    with pytest.raises(hs.DivergenceError, match=r"\['values'\].*1.0 on") as raised:
        strategy.check_equal({"values": values})
    assert (raised.value.element, raised.value.ranks) == ((1, 2), (1,))


def test_a_closed_strategy_refuses_arrays_on_gpus(make_strategy: Any) -> None:
    strategy = make_strategy()
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica makes no call")
    strategy.close()
    with pytest.raises(hs.CollectiveError, match="found one that is closed"):
        _total(strategy, 1)
    with pytest.raises(hs.CollectiveError, match="found one that is closed"):
        strategy.gather(cupy.ones(1), axis=0)
