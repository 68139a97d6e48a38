"""Tensors of torch on GPUs: calls are ordered with torch's own stream.

The stand-in makes the tensors, because torch has no GPU here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest

standin = pytest.importorskip("cupy._standin", reason="needs the stand-in's streams")
torch = pytest.importorskip("torch")


class Tensor:
    """A tensor of torch on a GPU, over an array of CuPy."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.dtype = array.dtype

    def detach(self) -> Tensor:
        return self

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None) -> Any:
        # Like torch: the caller's stream waits for torch's own stream.
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream))
        cupy.cuda.get_current_stream().wait_event(event)
        return self.array.__dlpack__(stream=-1)


@pytest.fixture
def side(strategy: Any, monkeypatch: Any) -> Iterator[Any]:
    """Make torch compute on a separate stream, and delay all streams."""
    # First make one call without delays, which creates objects that later calls need.
    strategy.reduce("sum", cupy.ones(3, cupy.float64), axis=None)
    stream = cupy.cuda.Stream(non_blocking=True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    device = cupy.cuda.runtime.getDevice()
    current = SimpleNamespace(cuda_stream=stream.ptr, device_index=device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(standin, "longest_delay", 0.03)
    yield stream
    stream.synchronize()


def _torch_backend() -> Any:
    keras = pytest.importorskip("keras")
    if keras.config.backend() != "torch":
        pytest.skip("Keras has another backend")
    from hpcstrat.integrations.keras.tensor_calls import _of_torch

    return _of_torch()


@pytest.mark.parametrize("path", ["sum of statistics", "means for Keras"])
def test_results_are_there_for_the_next_work_of_torchs_stream(
    strategy: Any, side: Any, path: str
) -> None:
    """The call sees torch's earlier work, and no value is copied through the host."""
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    with side:
        array = cupy.zeros(5000, cupy.float32)
        for _ in range(3):
            array += rank + 1
    wanted = 3 * sum(range(1, size + 1))
    if path == "sum of statistics":
        from hpcstrat.integrations.torch.batch_norm import _summed

        _summed(strategy, Tensor(array), "statistics")  # type: ignore[arg-type]
    else:
        _torch_backend().mean(strategy, [Tensor(array)], 1)
        wanted /= size
    with side:
        # The model's next kernel reads the array, and the kernel after it overwrites
        # it.
        seen = array * 1
        array.fill(-1)
        host = cupy.asnumpy(seen)
    np.testing.assert_array_equal(host, np.full(5000, wanted, np.float32))
