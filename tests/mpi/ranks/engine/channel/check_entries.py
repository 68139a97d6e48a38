"""Calls in functions that interrupt a call, such as handlers and finalizers."""

from __future__ import annotations

import functools
import gc
import signal
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

pytestmark = pytest.mark.calls


class _Object:
    """An object that may be weakly referenced."""


def _in_signal_handler(function: Callable[..., Any]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: function())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def _in_handler_that_restores_itself(function: Callable[..., Any]) -> None:
    def handler(number: int, frame: Any) -> None:
        signal.signal(number, before)
        function()

    before = signal.signal(signal.SIGUSR1, handler)
    signal.raise_signal(signal.SIGUSR1)


def _in_finalizer(function: Callable[..., Any]) -> None:
    class Ending:
        def __del__(self) -> None:
            function()

    Ending()


def _in_weakref_finalize(function: Callable[..., Any]) -> None:
    weakref.finalize(_Object(), function)


def _in_weakref_callback(function: Callable[..., Any]) -> None:
    one = _Object()
    kept = weakref.ref(one, lambda _: function())
    del one
    assert kept() is None


def _in_gc_callback(function: Callable[..., Any]) -> None:
    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            function()

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


_WAYS = (
    _in_signal_handler,
    _in_handler_that_restores_itself,
    _in_finalizer,
    _in_weakref_finalize,
    _in_weakref_callback,
    _in_gc_callback,
)


class _Interrupted:
    """An array; calls a function when the library reads it, in the middle of a call."""

    def __init__(self, array: Any, function: Callable[[], None]) -> None:
        self.array, self._function = array, function

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._function()
        return np.array(self.array, dtype=dtype)


def _started() -> Any:
    context: Any = hs.get_replica_context()
    return context.start_all_reduce("sum", np.ones(3))


def _calls(strategy: Any, iterator: Any, pending: Any) -> list[Callable[[], Any]]:
    return [
        lambda: strategy.reduce("sum", np.ones(3)),
        lambda: strategy.gather(np.ones(3), 0),
        strategy.barrier,
        lambda: strategy.broadcast_object("inner"),
        lambda: strategy.run(lambda: None),
        lambda: next(iterator),
        pending.wait,
        pending.test,
        strategy.close,
        lambda: hs.MultiWorkerMirroredStrategy(comm=strategy.topology.replica_comm),
        lambda: hs.Variable(np.ones(3), name="inner"),
        lambda: hs.Variable("no number", name="wrong"),
    ]


@pytest.mark.parametrize("way", _WAYS)
def test_a_call_that_interrupts_a_call_is_refused_on_its_rank_alone(
    make_strategy: Any, job: Any, way: Any
) -> None:
    if job.size == 1:
        return
    with make_strategy(comm=job) as strategy, strategy.scope():
        data = hs.Dataset.from_tensor_slices(np.arange(64.0)).batch(job.size)
        iterator = iter(strategy.experimental_distribute_dataset(data))
        right = np.full(3, sum(range(1, job.size + 1)))
        # Before the first call, no sum of this kind can be repeated by the kernel.
        np.testing.assert_array_equal(strategy.reduce("sum", right), right * job.size)
        for index in range(12):
            pending = strategy.local_value(strategy.run(_started))
            own: Any = np.full(3, 1 + job.rank)
            said: list[str] = []

            def act(call: Callable[[], Any], said: list[str] = said) -> None:
                try:
                    call()
                except Exception as error:
                    said.append(str(error))
                else:
                    said.append("made")

            if job.rank == 0:
                call = _calls(strategy, iterator, pending)[index]
                interrupt = functools.partial(way, functools.partial(act, call))
                own = _Interrupted(own, interrupt)
            np.testing.assert_array_equal(strategy.reduce("sum", own), right)
            np.testing.assert_array_equal(pending.wait(), np.full(3, job.size))
            assert len(said) == (job.rank == 0)
            for text in said:
                # A wrong argument is an error of its own, which is told to no rank, and
                # a started call that has ended already returns its result.
                good = "in the middle of reduce" in text or "no number" in text
                assert good or (index in (6, 7) and text == "made"), (index, text)
        np.testing.assert_array_equal(strategy.reduce("sum", own), right)


def test_a_program_may_make_calls_where_a_call_asks_for_its_array(
    make_strategy: Any, job: Any
) -> None:
    with make_strategy(comm=job) as strategy:
        found: list[Any] = []
        own = _Interrupted(
            np.full(3, 1.0), lambda: found.append(strategy.reduce("sum", np.ones(2)))
        )
        total = strategy.reduce("sum", own)
        np.testing.assert_array_equal(total, np.full(3, job.size))
        np.testing.assert_array_equal(found[0], np.full(2, job.size))
