"""Faults planted at every event inside of every collective call, on one rank.

``planted.py [--calls NAME,...] [--every N] [--first K] [--kinds KIND,...]`` tests the
calls of `CALLS`. A dry run lists the events of a call on one rank: each function that
is entered and each line that begins inside of hpcstrat, and each array that NumPy makes
for hpcstrat. Then each trial makes the call with an error raised at one event. Each
rank continues by itself, like a program that catches all errors, and makes the call
twice more. Either all ranks must raise an error, or no rank; or all ranks raise one in
the very next call. Each value that a call returns must be right, and no trial may
exceed a time limit. At the end, rank 0 prints the number of each outcome as a line of
JSON.

With ``--kinds call``, a signal handler makes a call at the event instead. This call
must be refused, and no rank may raise an error.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import numpy as np

import hpcstrat as hs
from hpcstrat import metrics, optimizers
from hpcstrat.layers import (
    SyncBatchNormalization,
    sync_batch_moments,
    sync_batch_moments_backward,
)
from hpcstrat.safety import exits

_PACKAGE = os.path.dirname(os.path.abspath(hs.__file__)) + os.sep
# Functions that begin and end calls. An error in one of their own lines belongs to a
# call that was never made, or that has already ended.
_EDGES = {
    (os.path.join(_PACKAGE, "engine", "channel", "entries.py"), "entry"),
    (os.path.join(_PACKAGE, "engine", "channel", "entries.py"), "enter"),
    (os.path.join(_PACKAGE, "engine", "channel", "failures.py"), "leave"),
}
_LIMIT_SECONDS = 20
_LATE_SECONDS = 0.004
# A loop that waits begins its lines any number of times, so only the first two count.
_MOST_OCCURRENCES = 2
_MAKERS = ("array", "asarray", "empty", "empty_like", "zeros", "zeros_like")
_MAKERS += ("concatenate", "frombuffer", "ascontiguousarray", "cumsum")
KINDS: dict[str, Any] = {"memory": MemoryError, "interrupt": KeyboardInterrupt}

# File, line and number of occurrences so far. The line is 0 for arrays.
Event = tuple[str, int, int]


def _in_call() -> bool:
    """Return whether this rank is in a collective call of any open strategy."""
    return any(channel.state.thread for channel in exits._channels)


def _none(place: str) -> None:
    """Plant nothing."""


class Tracer:
    """A context that records events, and plants an error or a call at one of them."""

    def __init__(
        self, at: Event | None = None, error: Callable[[str], Exception | None] = _none
    ) -> None:
        self.events: dict[Event, None] = {}
        self.raised = False
        self._at, self._error = at, error
        self._seen: Counter[tuple[str, int]] = Counter()

    def _meet(self, file: str, line: int) -> None:
        self._seen[file, line] += 1
        event = file, line, self._seen[file, line]
        if event[2] <= _MOST_OCCURRENCES:
            self.events[event] = None
        if event == self._at and not self.raised:
            self.raised = True
            error = self._error(f"planted at {file.removeprefix(_PACKAGE)}:{line}")
            if error is not None:
                raise error

    def _trace(self, frame: FrameType, what: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            return None
        is_inside = (file, frame.f_code.co_name) not in _EDGES and _in_call()
        if is_inside and what in ("call", "line"):
            self._meet(file, frame.f_lineno)
        return self._trace

    def _made(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if _in_call() and caller.f_code.co_filename.startswith(_PACKAGE):
                self._meet(f"{caller.f_code.co_filename}:{name}", -caller.f_lineno)
            return make(*args, **kwargs)

        return made

    def __enter__(self) -> Tracer:
        self._kept = {name: getattr(np, name) for name in _MAKERS}
        for name, make in self._kept.items():
            setattr(np, name, self._made(name, make))
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)
        for name, make in self._kept.items():
            setattr(np, name, make)


class Case:
    """A call that is made again and again on one strategy."""

    options: ClassVar[dict[str, Any]] = {}
    # True if the right result of `call` is that it catches an error of all ranks.
    catches: ClassVar[bool] = False

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.rank = strategy.replica_id
        self.size = strategy.num_replicas_in_sync
        self.make()

    def make(self) -> None:
        """Prepare the call, without faults."""

    def own(self, step: int, rank: int | None = None) -> float:
        return float(1 + (self.rank if rank is None else rank) + 10 * step)

    def total(self, step: int) -> float:
        return sum(self.own(step, rank) for rank in range(self.size))

    def call(self, step: int) -> Any:
        raise NotImplementedError

    def right(self, step: int) -> Any:
        """Return the expected result of `call`, or None if it is not compared."""
        return None

    def run(self, function: Callable[[Any], Any]) -> Any:
        strategy = self.strategy
        outcome = strategy.run(lambda: function(hs.get_replica_context()))
        return strategy.local_value(outcome)

    def end(self) -> None:
        """Clean up after the last call, without faults."""


def replica(name: str, call: Any, right: Any, make: Any = None, **options: Any) -> Any:
    """Return a case whose call is made in replica context."""

    def made(self: Any, step: int) -> Any:
        return self.run(lambda context: call(self, context, step))

    found = {"call": made, "right": right, "options": options}
    return type(name, (Case,), {**found, **({"make": make} if make else {})})


def cross(name: str, call: Any, right: Any, make: Any = None, **options: Any) -> Any:
    """Return a case whose call is made in cross-replica context."""
    found = {"call": call, "right": right, "options": options}
    return type(name, (Case,), {**found, **({"make": make} if make else {})})


def full(length: Any, dtype: Any = np.float64) -> Callable[[Case, int], Any]:
    return lambda self, step: np.full(length, self.total(step), dtype)


def array_of(length: int, dtype: Any = np.float64) -> Callable[[Case, int], Any]:
    return lambda self, step: np.full(length, self.own(step), dtype)


def reduced(length: int, dtype: Any = np.float64) -> Any:
    of = array_of(length, dtype)
    return replica(
        "reduced",
        lambda self, context, step: context.all_reduce("sum", of(self, step)),
        full(length, dtype),
    )


def _tree(self: Case, step: int) -> Any:
    own = self.own(step)
    return {"a": np.float32(own), "b": [np.full((2, 3), own), np.int64(own)]}


def _tree_right(self: Case, step: int) -> Any:
    total = self.total(step)
    return {"a": np.float32(total), "b": [np.full((2, 3), total), np.int64(total)]}


def _rows(self: Case, context: Any, step: int) -> Any:
    values = np.full((1, 2), self.own(step))
    rows = hs.IndexedSlices(values, np.array([self.rank]), (self.size, 2))
    found = context.all_reduce("sum", [rows, np.float64(self.own(step))])
    return [found[0].to_dense(), found[1]]


def _rows_right(self: Case, step: int) -> Any:
    dense = np.array([[self.own(step, r)] * 2 for r in range(self.size)])
    return [dense, np.float64(self.total(step))]


def _started(self: Case, context: Any, step: int) -> Any:
    first = context.start_all_reduce("sum", np.full(4, self.own(step)))
    second = context.start_all_reduce("sum", np.full(300_000, self.own(step)))
    return [first.wait(), second.wait()[:2]]


def _started_right(self: Case, step: int) -> Any:
    return [np.full(4, self.total(step)), np.full(2, self.total(step))]


def every_own(self: Case, step: int) -> Any:
    return [self.own(step, rank) for rank in range(self.size)]


def _gathered(self: Case, step: int) -> Any:
    return np.concatenate([np.full(r + 1, self.own(step, r)) for r in range(self.size)])


def _parts(self: Case, step: int) -> Any:
    return np.full(self.rank + 1, self.own(step))


def _exchanged(self: Case, step: int) -> Any:
    """Send an array to the next rank, and receive one from the rank before."""
    into = np.empty(4)
    to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
    moves = self.strategy.collectives.moves
    moves.exchange({to: array_of(4)(self, step)}, {source: into}, "exchange")
    return into


def _all_to_all(self: Case, step: int) -> Any:
    into = [np.empty(2) for _ in range(self.size)]
    sent = [array_of(2)(self, step) for _ in range(self.size)]
    self.strategy.collectives.moves.all_to_all(sent, into, "all_to_all")
    return np.concatenate(into)


def _gathered_into(length: int) -> Callable[[Case, int], Any]:
    def call(self: Case, step: int) -> Any:
        into = [np.empty(length) for _ in range(self.size)]
        own = array_of(length)(self, step)
        self.strategy.collectives.moves.all_gather_into(own, into, "all_gather")
        return np.concatenate(into)

    return call


def _of_all(length: int) -> Callable[[Case, int], Any]:
    return lambda self, step: np.concatenate(
        [np.full(length, self.own(step, rank)) for rank in range(self.size)]
    )


def _broadcast_into(self: Case, step: int) -> Any:
    array = array_of(3)(self, step)
    self.strategy.collectives.moves.broadcast_into(array, 0, "broadcast")
    return array


def _part_of_sum(self: Case, step: int) -> Any:
    parts, into = [array_of(3)(self, step) for _ in range(self.size)], np.empty(3)
    self.strategy.collectives.parts.reduce_scatter(np.add, parts, into, "scatter")
    return into


def _combined(self: Case, step: int) -> Any:
    array = array_of(3)(self, step)
    self.strategy.collectives.parts.combine(np.maximum, array, "combine")
    return array


def _combined_right(self: Case, step: int) -> Any:
    return np.full(3, max(every_own(self, step)))


def _variable(synchronization: str, aggregation: str) -> Callable[[Any], None]:
    def make(self: Any) -> None:
        with self.strategy.scope():
            self.variable = hs.Variable(
                *(np.zeros(3),),
                synchronization=synchronization,
                aggregation=aggregation,
                name="planted",
            )

    return make


def _assigned(self: Any, context: Any, step: int) -> Any:
    self.variable.assign(np.full(3, self.own(step)))
    return self.variable.numpy()


def _scattered(self: Any, context: Any, step: int) -> Any:
    self.variable.assign(np.zeros(3))
    rows = hs.IndexedSlices(np.array([self.own(step)]), np.array([1]), (3,))
    self.variable.scatter_add(rows)
    return self.variable.numpy()


def _read(self: Any, step: int) -> Any:
    # Write a different component on each replica directly, where no fault is planted.
    self.variable._component[...] = self.own(step)
    return self.variable.numpy()


def _created(self: Any, step: int) -> Any:
    with self.strategy.scope():
        made = hs.Variable(np.full(3, self.own(step)), name=f"made {step}")
    return made.numpy()


def _make_optimizer(self: Any) -> None:
    with self.strategy.scope():
        self.weights = hs.Variable(np.zeros(3), name="weights")
        self.optimizer = optimizers.SGD(1.0, momentum=0.0)


def _stepped(self: Any, context: Any, step: int) -> Any:
    before = self.weights.numpy()
    gradient = np.full(3, self.own(step))
    self.optimizer.apply_gradients([(gradient, self.weights)])
    return before - self.weights.numpy()


def _make_groups(self: Any) -> None:
    comm = self.strategy.topology.replica_comm
    self.groups = hs.SyncGroups(size=1, every=1, outer=optimizers.SGD(1.0), comm=comm)
    with self.groups.strategy.scope():
        self.weights = hs.Variable(np.zeros(3), name="weights")


def _averaged(self: Any, step: int) -> Any:
    # Write the value that the groups agreed on last, changed by this group.
    before = self.groups.checkpoint_variables()["value/weights"].numpy()
    self.weights.component[...] = before - self.own(step)
    self.groups.step()
    return (before - self.weights.numpy()) * self.size


def _abandon(self: Any) -> None:
    self.groups.strategy.abandon()
    self.groups.everyone.abandon()


def _make_metric(self: Any) -> None:
    with self.strategy.scope():
        self.metric = metrics.Sum()


def _measured(self: Any, step: int) -> Any:
    for variable in self.metric.checkpoint_variables().values():
        variable._component[...] = self.own(step)
    return np.asarray(self.metric.result(), np.float64)


def _moments(self: Case, context: Any, step: int) -> Any:
    mean, _, count = sync_batch_moments(np.full((2, 3), self.own(step)))
    return [mean * self.size, count]


def _derivatives(self: Case, context: Any, step: int) -> Any:
    moments = np.zeros(3), np.ones(3), 2 * self.size
    x, by = np.ones((2, 3)), np.full(3, self.own(step))
    return sync_batch_moments_backward(x, moments, by, np.zeros(3)) * 2 * self.size


def _make_layer(self: Any) -> None:
    with self.strategy.scope():
        self.layer = SyncBatchNormalization(3)


def _normalized(self: Any, context: Any, step: int) -> Any:
    # Half of the values lie below the mean, half of them above it.
    x = np.repeat(np.array([[-1.0], [1.0]]), 3, axis=1)
    y = self.layer.forward(x, training=True)
    dx, _, dbeta = self.layer.backward(np.full((2, 3), self.own(step)))
    return [np.sign(y), dbeta / 2, np.ones(()) * bool(np.isfinite(dx).all())]


def _normalized_right(self: Any, step: int) -> Any:
    signs = np.repeat(np.array([[-1.0], [1.0]]), 3, axis=1)
    return [signs, np.full(3, self.own(step)), np.ones(())]


def _make_data(self: Any) -> None:
    self.batches = iter(
        self.strategy.experimental_distribute_dataset(
            hs.Dataset(np.arange(12288.0), 12, shuffle=False)
        )
    )


def _make_dealt(self: Any) -> None:
    every = (np.arange(12.0) for _ in range(4096))
    self.batches = iter(self.strategy.experimental_distribute_dataset(every))


def _next(self: Any, step: int) -> Any:
    found = self.strategy.local_value(next(self.batches))
    return np.asarray(len(found) >= 1, np.float64)


def _merged(self: Case, context: Any, step: int) -> Any:
    def merge(strategy: Any, value: Any) -> Any:
        return strategy.reduce("sum", value, axis=None)

    return context.merge_call(merge, (np.full(3, self.own(step)),))


def _make_saving(self: Any) -> None:
    make = _variable("on_write", "mean")
    make(self)
    folder = tempfile.mkdtemp(prefix="planted-") if self.rank == 0 else None
    self.folder = self.strategy.broadcast_object(folder)
    with self.strategy.scope():
        self.manager = hs.CheckpointManager(self.folder, w=self.variable)


def _saved(self: Any, step: int) -> Any:
    self.variable.assign(np.full(3, float(step)))
    self.manager.save(step + 1, overwrite=True)
    return np.ones(())


def _make_restoring(self: Any) -> None:
    _make_saving(self)
    self.variable.assign(np.full(3, 7.0))
    self.manager.save(1)


def _restored(self: Any, step: int) -> Any:
    self.variable.assign(np.zeros(3))
    self.manager.restore()
    return self.variable.numpy()


def _unequal(self: Any, step: int) -> Any:
    try:
        self.strategy.check_equal([np.full(3, self.own(step))])
    except hs.errors.DivergenceError:
        return np.ones(())
    return np.zeros(())


def _remove(self: Any) -> None:
    if self.rank == 0:
        shutil.rmtree(self.folder, ignore_errors=True)


def _value(value: Any) -> Callable[[Any, int], Any]:
    return lambda self, step: value


class _Hooked(hs.CrossDeviceOps):
    def reduce_implementation(self, *given: Any) -> Any:
        return super().reduce_implementation(*given)


def _neighbors(self: Case, step: int) -> list[float]:
    """Return the numbers of the ranks before and after this one; 0 outside."""
    ranks = self.rank - 1, self.rank + 1
    return [self.own(step, r) if 0 <= r < self.size else 0.0 for r in ranks]


def _halo_right(self: Case, step: int) -> Any:
    before, after = _neighbors(self, step)
    return np.array([before, *[self.own(step)] * 4, after])


def _halo_adjoint_right(self: Case, step: int) -> Any:
    return self.own(step) + np.array(_neighbors(self, step))


def _transposed(self: Case, step: int) -> Any:
    rows = np.full((2, self.size), self.own(step))
    return self.strategy.collectives.fields.transpose(rows, 0, 1)


CALLS: dict[str, type[Case]] = {
    "all_reduce": reduced(16),
    "all_reduce_tree": replica(
        "tree",
        lambda self, context, step: context.all_reduce("sum", _tree(self, step)),
        _tree_right,
    ),
    "all_reduce_half": reduced(16, np.float16),
    "all_reduce_large": reduced(300_000),
    "all_reduce_max": replica(
        "max",
        lambda self, context, step: context.all_reduce("max", array_of(3)(self, step)),
        lambda self, step: np.full(3, self.own(step, self.size - 1)),
    ),
    "all_reduce_rows": replica("rows", _rows, _rows_right),
    "all_reduce_out": replica(
        "out",
        lambda self, context, step: context.all_reduce(
            "sum", array_of(5)(self, step), out=np.empty(5)
        ),
        full(5),
    ),
    "start_all_reduce": replica("started", _started, _started_right),
    "start_all_gather": replica(
        "started_gather",
        lambda self, context, step: [
            context.start_all_gather(np.full(n, self.own(step)), 0).wait()[:: n // 2]
            for n in (4, 300_000)
        ],
        lambda self, step: [np.repeat(every_own(self, step), 2)] * 2,
    ),
    "all_gather": replica(
        "gather",
        lambda self, context, step: context.all_gather(_parts(self, step), 0),
        _gathered,
    ),
    "merge_call": replica("merged", _merged, full(3)),
    "reduce": cross(
        "reduce",
        lambda self, step: self.strategy.reduce("sum", array_of(4)(self, step)),
        full(4),
    ),
    "reduce_axis": cross(
        "axis",
        lambda self, step: self.strategy.reduce("mean", _parts(self, step), axis=0),
        lambda self, step: _gathered(self, step).mean(),
    ),
    "reduce_mpi": cross(
        "mpi",
        lambda self, step: self.strategy.reduce("sum", array_of(4)(self, step)),
        full(4),
        cross_device_ops=hs.MpiAllReduce(),
    ),
    "reduce_by_hooks": cross(
        "hooks",
        lambda self, step: self.strategy.reduce("sum", array_of(4)(self, step)),
        full(4),
        cross_device_ops=_Hooked(),
    ),
    # With ``--layout 1`` these calls work between workers.
    "reduce_hierarchical": cross(
        "hierarchical",
        lambda self, step: self.strategy.reduce("sum", array_of(30_000)(self, step)),
        full(30_000),
        cross_device_ops=hs.HierarchicalCopyAllReduce(),
    ),
    "reduce_to_one": cross(
        "one",
        lambda self, step: self.strategy.reduce("sum", array_of(4)(self, step)),
        full(4),
        cross_device_ops=hs.ReductionToOneDevice(),
    ),
    "groups_step": type(
        "averaged",
        (cross("averaged", _averaged, full(3), _make_groups),),
        {"end": _abandon},
    ),
    "gather": cross(
        "gather",
        lambda self, step: self.strategy.gather(_parts(self, step), 0),
        _gathered,
    ),
    "exchange": cross(
        "exchange",
        _exchanged,
        lambda self, step: np.full(4, self.own(step, (self.rank - 1) % self.size)),
    ),
    "all_to_all": cross("all_to_all", _all_to_all, _of_all(2)),
    "halo": cross(
        "halo",
        lambda self, step: self.strategy.collectives.fields.halo(
            array_of(4)(self, step), 0, 1
        ),
        _halo_right,
    ),
    "halo_adjoint": cross(
        "halo adjoint",
        lambda self, step: self.strategy.collectives.fields.halo_adjoint(
            array_of(4)(self, step), 0, 1
        ),
        _halo_adjoint_right,
    ),
    "transpose": cross(
        "transpose",
        _transposed,
        lambda self, step: np.repeat(
            [self.own(step, rank) for rank in range(self.size)], 2
        )[:, None],
    ),
    "all_gather_into": cross("gather into", _gathered_into(3), _of_all(3)),
    # Ranks that share cores read such arrays in each other's memory.
    "all_gather_large": cross("large", _gathered_into(70_000), _of_all(70_000)),
    "broadcast_into": cross(
        "broadcast into",
        _broadcast_into,
        lambda self, step: np.full(3, self.own(step, 0)),
    ),
    "reduce_scatter": cross("part of a sum", _part_of_sum, full(3)),
    "combine": cross("combined parts", _combined, _combined_right),
    "barrier": cross(
        "barrier", lambda self, step: self.strategy.barrier(), _value(None)
    ),
    "broadcast_object": cross(
        "object",
        lambda self, step: self.strategy.broadcast_object(["object", step]),
        lambda self, step: ["object", step],
    ),
    "random": cross(
        "random",
        lambda self, step: self.strategy.random(f"planted {step}") and None,
        _value(None),
    ),
    "check_divergence": cross(
        "divergence",
        lambda self, step: self.strategy.check_divergence(),
        _value(None),
        _variable("on_write", "mean"),
    ),
    "check_equal": cross(
        "equal",
        lambda self, step: self.strategy.check_equal({"a": np.ones(3), "b": step}),
        _value(None),
    ),
    "check_unequal": type(
        "unequal",
        (cross("unequal", _unequal, _value(np.ones(()))),),
        {"catches": True},
    ),
    "create_variable": cross(
        "create", _created, lambda self, step: np.full(3, self.own(step, 0))
    ),
    "assign": replica("assign", _assigned, full(3), _variable("on_write", "sum")),
    "scatter_add": replica(
        "scatter",
        _scattered,
        lambda self, step: np.array([0, self.total(step), 0]),
        _variable("on_write", "sum"),
    ),
    "read": cross("read", _read, full(3), _variable("on_read", "sum")),
    "apply_gradients": replica("optimizer", _stepped, full(3), _make_optimizer),
    "metric": cross("metric", _measured, full(()), _make_metric),
    "moments": replica(
        "moments",
        _moments,
        lambda self, step: [np.full(3, self.total(step)), 2 * self.size],
    ),
    "moments_backward": replica(
        "backward", _derivatives, lambda self, step: np.full((2, 3), self.total(step))
    ),
    "normalization": replica("layer", _normalized, _normalized_right, _make_layer),
    "next": cross("next", _next, _value(np.ones(())), _make_data),
    "next_dealt": cross("dealt", _next, _value(np.ones(())), _make_dealt),
    "run_raising": type("raising", (reduced(8),), {"options": {"on_error": "raise"}}),
    "save": type(
        "save",
        (cross("save", _saved, _value(np.ones(())), _make_saving),),
        {"end": _remove},
    ),
    "restore": type(
        "restore",
        (cross("restore", _restored, _value(np.full(3, 7.0)), _make_restoring),),
        {"end": _remove},
    ),
}


def equal(found: Any, right: Any) -> bool:
    if isinstance(right, dict):
        return all(equal(found[k], right[k]) for k in right)
    if isinstance(right, list):
        return all(equal(f, r) for f, r in zip(found, right, strict=True))
    return found == right if right is None else bool(np.array_equal(found, right))


class Sweep:
    """Trials for all events of some calls, with the faults on one rank."""

    def __init__(self, options: Any) -> None:
        from mpi4py import MPI

        self.options = options
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.rank
        self.case: Case | None = None
        self.step = 0
        self.wrong: list[str] = []
        # The outcomes of the calls in the signal handler.
        self.handled: list[str] = []
        signal.signal(signal.SIGUSR1, self.handle)

    def fresh(self, kind: type[Case]) -> Case:
        """Return a working case; make a new one if the last one broke."""
        if self.case is None:
            strategy = hs.MultiWorkerMirroredStrategy(
                comm=self.comm, **self.options.layout, **kind.options
            )
            self.case = kind(strategy)
            # Make one call first, so that work of the first call is not part of the
            # trials.
            if not self.options.cold:
                self.attempt(self.case)
        return self.case

    def leave(self, together: bool) -> None:
        """Close or abandon the current case."""
        if self.case is not None:
            self.case.end()
            self.case.strategy.close() if together else self.case.strategy.abandon()
        self.case = None

    def attempt(self, case: Case, tracer: Tracer | None = None) -> tuple[bool, str]:
        """Make the call; return whether it raised, and the error or problem."""
        self.step += 1
        try:
            with tracer or contextlib.nullcontext():
                found = case.call(self.step)
        except BaseException as error:
            return True, repr(error)[:200]
        right = case.right(self.step)
        if equal(found, right):
            return False, ""
        return False, f"found {found}, expected {right}"

    def handle(self, *_: Any) -> None:
        """Make a call that the call of every case could take for its own."""
        assert self.case is not None
        try:
            self.case.strategy.broadcast_object("handled")
        except hs.CollectiveError as error:
            self.handled.append(str(error))
        except BaseException as error:
            self.handled.append(repr(error))
        else:
            self.handled.append("made")

    def planted(self, kind: str) -> Callable[[str], Any]:
        """Return the function that plants a fault of this kind at an event."""
        if kind == "call":
            return lambda place: signal.raise_signal(signal.SIGUSR1)
        found: Callable[[str], Any] = KINDS[kind]
        return found

    def late(self, waits: bool) -> None:
        time.sleep(_LATE_SECONDS if waits else 0)

    def events(self, kind: type[Case], where: int) -> list[tuple[bool, Event]]:
        """List the events of a call on a late rank, and on a rank that waits."""
        found: dict[tuple[bool, Event], None] = {}
        for waits in (False, True):
            case, tracer = self.fresh(kind), Tracer()
            self.comm.Barrier()
            self.late((self.rank == where) is not waits)
            raised, wrong = self.attempt(case, tracer)
            assert not raised, f"a call without a fault failed: {wrong}"
            assert not wrong, wrong
            seen = {event for _, event in found}
            found |= {(waits, e): None for e in tracer.events if e not in seen}
        every: list[tuple[bool, Event]] = self.comm.bcast(list(found), root=where)
        return every

    def trial(self, kind: type[Case], where: int, planned: Any, error: str) -> str:
        """Plant one fault, and return the outcome of the trial."""
        waits, event = planned
        case = self.fresh(kind)
        tracer = Tracer(event, self.planted(error)) if self.rank == where else None
        self.handled = []
        faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
        if self.options.show and self.rank == where:
            print(f"next: {error} at {event}, waits={waits}", file=sys.stderr)
        self.comm.Barrier()
        self.late((self.rank == where) is not waits)
        begun = self.step
        told = [self.attempt(case, tracer)]
        told += [self.attempt(case) for _ in range(2)]
        # Keep the step small, so that sums of half-precision types stay exact.
        self.step = (begun + 3) % 48
        every = self.comm.allgather((told, tracer is not None and tracer.raised))
        handled = self.comm.bcast(self.handled, root=where)
        faulthandler.cancel_dump_traceback_later()
        outcome, problem = self.judge([t for t, _ in every], kind.catches)
        if not any(raised for _, raised in every):
            outcome = "not reached"
        elif error == "call" and not problem:
            refused = len(handled) == 1 and "in the middle of" in handled[0]
            problem = "" if refused and outcome == "none raised" else f"{handled}"
            outcome = "refused"
        if problem:
            file, line, number = event
            place = f"{file.removeprefix(_PACKAGE)}:{line} ({number})"
            self.wrong.append(f"{error} at {place}, waits={waits}: {problem}")
            outcome = "wrong"
        if problem or "broken" in outcome:
            self.leave(together=False)
        return outcome

    @staticmethod
    def judge(every: list[list[tuple[bool, str]]], catches: bool) -> tuple[str, str]:
        """Return the outcome of a trial, and its problem as text."""
        calls = list(zip(*every, strict=True))
        raised = [[r for r, _ in call] for call in calls]
        for number, call in enumerate(calls):
            values = [f"rank {k} {t}" for k, (r, t) in enumerate(call) if t and not r]
            if values:
                return "", f"call {number}: {'; '.join(values)}"
        first, second, third = raised
        if catches and any(first):
            # The ranks without the fault have caught the error of the call.
            first = [True] * len(first)
        if not any(first):
            return "none raised", "" if not any(second + third) else f"{raised}"
        if all(first) and not any(second + third):
            return "all raised", ""
        if all(second) and all(third):
            return "all raised, broken" if all(first) else "next raised, broken", ""
        return "", f"raised {raised}, with {every}"

    def go(self) -> dict[str, Any]:
        counts: dict[str, Any] = {}
        for name in self.options.calls:
            kind, found = CALLS[name], Counter[str]()
            for where in self.options.ranks:
                events = self.events(kind, where % self.comm.size)
                self.plant(kind, where % self.comm.size, events, found)
            self.leave(together=True)
            counts[name] = {"events": sum(found.values()), **found}
            if self.rank == 0:
                print(f"{name}: {dict(counts[name])}", flush=True)
        return counts

    def plant(
        self, kind: type[Case], where: int, events: list[Any], found: Counter[str]
    ) -> None:
        every = [(e, error) for e in events for error in self.options.kinds]
        for planned, error in every[self.options.first :: self.options.every]:
            outcome = self.trial(kind, where, planned, error)
            found[outcome] += 1
            if self.rank == 0 and outcome == "wrong":
                print(f"WRONG {self.wrong[-1]}", flush=True)


def _layouts(text: str) -> dict[str, Any]:
    return {"replicas_per_worker": int(text)} if text else {}


def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", default=",".join(CALLS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ranks", default="0,1")
    parser.add_argument("--layout", type=_layouts, default="")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    options.calls = options.calls.split(",")
    options.kinds = options.kinds.split(",")
    options.ranks = [int(rank) for rank in options.ranks.split(",")]
    sweep = Sweep(options)
    counts = sweep.go()
    if sweep.rank == 0:
        print(json.dumps({"counts": counts, "wrong": sweep.wrong}), flush=True)
    return bool(sweep.wrong)


if __name__ == "__main__":
    sys.exit(main())
