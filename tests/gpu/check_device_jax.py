"""Exchanges of JAX on a GPU: in XLA's stream, in XLA's memory.

JAX has no GPU here, so its programs for CPUs stand in for programs on a GPU. They are
compiled with the handler for GPUs, and `_xla` does the work of XLA around the handler:
arguments arrive late, in a stream that the handler receives as it would from XLA, and
the next kernels of this stream read the results and overwrite the arguments.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
import pytest

standin = pytest.importorskip("cupy._standin", reason="needs the stand-in's streams")
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from cupy import _store  # noqa: E402
from jax.interpreters import mlir  # noqa: E402

import hpcstrat.integrations.jax as hsj  # noqa: E402
from hpcstrat.integrations.jax import primitive, xla_handler  # noqa: E402


class _Xla:
    """XLA's part on a GPU: its single stream, and a count of the handler's calls."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.calls = 0
        # XLA keeps the handler until the process ends, so this reference must live as
        # long.
        self.handler = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.POINTER(xla_handler._Frame)
        )(self._called)

    def _called(self, pointer: Any) -> Any:
        frame = pointer.contents
        if frame.extension or frame.stage != xla_handler._EXECUTE:
            return xla_handler._handle_on_gpu(pointer)
        self.calls += 1
        arguments = _memory(frame.arguments)
        results = _memory(frame.results)
        places = {(m.ctypes.data, m.nbytes) for m in (*arguments, *results)}
        blocks = [
            _store._add(_store.Block("cuda", _store.foreign(*place), 0))
            for place in places
        ]
        for block in blocks:
            block.device = self.stream.device_id
        whole = xla_handler._Api.from_buffer_copy(frame.api.contents)
        whole.stream_get = type(whole.stream_get)(self._stream_get)
        frame.api, before = ctypes.pointer(whole), frame.api
        try:
            values = [argument.copy() for argument in arguments]
            for argument, value in zip(arguments, values, strict=True):
                argument.fill(0xAA)
                self._later(np.copyto, argument, value)
            error = xla_handler._handle_on_gpu(pointer)
            seen = [np.empty_like(result) for result in results]
            for copy, result in zip(seen, results, strict=True):
                self._later(np.copyto, copy, result)
            for memory in (*arguments, *results):
                self._later(np.ndarray.fill, memory, 0xBB)
            # Wait for this stream only, so that work not ordered with it is found
            # missing.
            self.stream.synchronize()
            # Restore the arguments, which the program may read again, and copy the
            # results; some arguments share memory with results.
            for copy, memory in zip(
                (*values, *seen), (*arguments, *results), strict=True
            ):
                np.copyto(memory, copy)
        finally:
            frame.api = before
            for block in blocks:
                _store._remove(block.ptr, {"cuda"})
        return error

    def _later(self, function: Any, *arguments: Any) -> None:
        self.stream._queue.put(lambda: function(*arguments))

    def _stream_get(self, pointer: Any) -> None:
        pointer.contents.stream = self.stream.ptr


def _memory(buffers: Any) -> list[Any]:
    """Return XLA's arguments or results as bytes, without arrays of no elements."""
    arrays = xla_handler._arrays(buffers, xla_handler._array)
    flat = [np.asarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return [memory for memory in flat if memory.size]


@pytest.fixture(scope="session")
def handled() -> _Xla:
    """Register XLA's part with JAX, under the name of the handler for GPUs."""
    made = _Xla()
    target = jax.ffi.pycapsule(made.handler)
    jax.ffi.register_ffi_target(xla_handler.GPU_TARGET, target, platform="cpu")
    return made


@pytest.fixture
def xla(strategy: Any, handled: _Xla, monkeypatch: Any) -> Iterator[_Xla]:
    """Compile functions as for a GPU, and delay all streams."""
    strategy.reduce("sum", cupy.ones(3, cupy.float64), axis=None)
    handled.stream = cupy.cuda.Stream(non_blocking=True)
    handled.calls = 0
    primitive._give_rules()
    rules = mlir._platform_specific_lowerings["cpu"]
    on_gpu = mlir._platform_specific_lowerings["cuda"][primitive._exchange]
    monkeypatch.setitem(rules, primitive._exchange, on_gpu)
    monkeypatch.setattr(standin, "longest_delay", 0.01)
    jax.clear_caches()
    yield handled
    jax.clear_caches()


def test_sums_inside_of_jit_take_their_place_in_xlas_stream(
    strategy: Any, xla: Any
) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id

    @jax.jit
    def step(x: Any) -> Any:
        y = hsj.all_reduce({"a": x * 2, "b": x.astype(jnp.bfloat16)}, "sum", strategy)
        return hsj.all_reduce(y["a"] + 1, "mean", strategy), y["b"]

    x = jnp.full(3000, rank + 1, jnp.float32)
    mean, half = step(x)
    whole = sum(range(1, size + 1))
    np.testing.assert_array_equal(mean, np.full(3000, 2 * whole + 1, np.float32))
    np.testing.assert_array_equal(half.astype(np.float32), np.full(3000, whole))
    np.testing.assert_array_equal(x, np.full(3000, rank + 1, np.float32))
    assert xla.calls == 2


def test_other_exchanges_and_their_gradients(strategy: Any, xla: Any) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    root = size - 1

    @jax.jit
    def step(x: Any) -> Any:
        def loss(y: Any) -> Any:
            rows = hsj.all_gather(y, 0, strategy)
            return jnp.sum(rows[:2]) + jnp.sum(hsj.broadcast(y, root, strategy))

        gathered = hsj.all_gather(x, 1, strategy)
        return gathered, hsj.broadcast(x, root, strategy), jax.grad(loss)(x)

    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + 10 * rank
    gathered, cast, gradient = step(x)
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    every = [plain + 10 * number for number in range(size)]
    np.testing.assert_array_equal(gathered, np.concatenate(every, 1))
    np.testing.assert_array_equal(cast, every[root])
    wanted = size * ((rank == 0) + (rank == root))
    np.testing.assert_array_equal(gradient, np.full((2, 3), wanted, np.float32))
    assert xla.calls >= 6


def test_arrays_without_elements_and_integers(strategy: Any, xla: Any) -> None:
    size = strategy.num_replicas_in_sync
    step = jax.jit(lambda tree: hsj.all_reduce(tree, "sum", strategy))
    tree = {"none": jnp.zeros((0, 4)), "count": jnp.int32(3), "z": jnp.complex64(2j)}
    total = step(tree)
    assert total["none"].shape == (0, 4)
    assert int(total["count"]) == 3 * size
    assert complex(total["z"]) == 2j * size
    assert xla.calls == 1


def test_a_call_between_jitted_functions_is_one_of_xla(
    strategy: Any, xla: Any, monkeypatch: Any
) -> None:
    """The results are in XLA's memory; the call comes after exchanges inside of jit."""
    size = strategy.num_replicas_in_sync
    monkeypatch.setattr(primitive, "is_on_host", lambda leaf: False)
    inside = jax.jit(lambda x: hsj.all_reduce(x, "sum", strategy))
    x = inside(jnp.ones(1000))
    for _ in range(3):
        x = hsj.all_reduce(x, "mean", strategy) + 1
    np.testing.assert_array_equal(x, np.full(1000, size + 3, np.float32))
    assert xla.calls == 4
    total = strategy.reduce("sum", np.float64(1), axis=None)
    assert total == size


def test_replicas_that_disagree_all_learn_of_it(strategy: Any, xla: Any) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.replica_id
    if size == 1:
        pytest.skip("one rank agrees with itself")
    step = jax.jit(lambda x: hsj.all_reduce(x, "sum", strategy))
    with pytest.raises(RuntimeError, match=r"CollectiveError: .*all_reduce"):
        jax.block_until_ready(step(jnp.ones(3 + (rank == 0))))
    np.testing.assert_array_equal(step(jnp.ones(2)), np.full(2, size, np.float32))
    assert xla.calls == 2


def test_functions_are_compiled_for_gpus_with_the_handler_for_them(
    strategy: Any,
) -> None:
    """JAX's lowering rules compile this, because XLA has no compiler for GPUs here."""
    strategy.reduce("sum", cupy.ones(3), axis=None)
    step = jax.jit(lambda x: hsj.all_reduce({"w": x, "v": x}, "sum", strategy))
    text = step.trace(jnp.ones(3)).lower(lowering_platforms=("cuda",)).as_text()
    assert f"@{xla_handler.GPU_TARGET}(" in text
    # Sums reuse the memory of the arguments, after the token that orders the calls.
    assert "stablehlo.token" in text
    assert text.count("#stablehlo.output_operand_alias<") == 2
