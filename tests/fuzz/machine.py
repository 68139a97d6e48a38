"""The operations of a program outside of ``run``, on one rank."""

from __future__ import annotations

import importlib
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.fuzz.faults import Interrupting, memory_runs_out
from tests.fuzz.program import Op, ranks_per_replica
from tests.fuzz.replica import step_of
from tests.fuzz.sources import iterable_of, rows_of

__all__ = ["ABSENT", "Machine", "PlainState", "settle"]

ABSENT = "this rank has no part in it"
_FAR_SECONDS = 3600.0
# Steps between two saves to the disk, if the program keeps snapshots.
_NEVER = 1_000_000
# Modules of further operations; a job imports only the modules that it needs.
_ELSEWHERE = {"round": "grouped", "end_round": "grouped", "schedule": "served"}
# Operations that one worker does for all workers that share variables.
_OF_ONE = ("assign", "rows", "save")
_DECLARED = ("variable", "optimizer", "metric", "dataset", "state")


def _module(name: str) -> Any:
    return importlib.import_module(f"tests.fuzz.{name}")


class PlainState:
    """Plain state of the program."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class Machine:
    """The objects that a program has made so far on this rank.

    Parameters
    ----------
    world : mpi4py.MPI.Intracomm
        The fuzzer's own communicator of all ranks.
    folder : path
        Empty folder for checkpoints.
    """

    def __init__(self, world: Any, folder: Path) -> None:
        self.world, self._folder = world, folder
        self.comm: Any = None
        self.strategy: Any = None
        self.groups: Any = None
        # Whether the program has ended on its ranks.
        self.over = False
        # Communicator of the workers that share variables without a coordinator.
        self.workers: Any = None
        self._declared: list[Op] = []
        self.variables: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.datasets: dict[str, Any] = {}
        self.states: dict[str, PlainState] = {}
        self._manager: Any = None
        self._saves = 0
        # True if the program keeps snapshots in the memory of the nodes.
        self._keeps_snapshots = False
        self._numpy = ExitStack()

    @property
    def rank(self) -> int:
        """Return this replica's number among the replicas of all groups."""
        return int(self.everyone.replica_id)

    @property
    def size(self) -> int:
        """Return the current number of replicas."""
        return int(self.everyone.num_replicas_in_sync)

    @property
    def everyone(self) -> Any:
        """Return the strategy of all replicas."""
        return self.strategy if self.groups is None else self.groups.everyone

    def struck(self, op: Op) -> bool:
        """Return whether the fault of an operation occurs on this rank."""
        size = self.size
        if not op.fault or (size == 1 and op.fault[0] == "step"):
            return False
        return bool(op.fault[1] % size == self.rank)

    def do(self, op: Op) -> Any:
        """Perform an operation, and return the result that a program sees."""
        if op.kind in ("strategy", "restart"):
            return getattr(self, f"_{op.kind}")(op)
        self._saves += op.kind == "save"
        if self.strategy is None:
            if op.kind in _DECLARED:
                self._declared.append(op)
            return ABSENT
        try:
            with self._planted(op):
                return self.seen(self._done(op))
        finally:
            if self.workers is not None:
                self.workers.Barrier()

    def _done(self, op: Op) -> Any:
        if op.kind in _OF_ONE and not self.strategy.saves_checkpoints:
            return self._saves if op.kind == "save" else None
        if op.kind in _ELSEWHERE:
            return getattr(_module(_ELSEWHERE[op.kind]), op.kind)(self, op)
        return getattr(self, f"_{op.kind}")(op)

    def seen(self, value: Any) -> Any:
        """Return a copy of this rank's part of a result."""
        value = self.strategy.local_value(value)
        if isinstance(value, dict):
            return {key: self.seen(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.seen(part) for part in value]
        return np.array(value) if isinstance(value, np.ndarray) else value

    def _planted(self, op: Op) -> AbstractContextManager[Any]:
        if op.fault and op.fault[0] == "memory" and self.struck(op):
            return memory_runs_out()
        return ExitStack()

    def _strategy(self, op: Op) -> Any:
        count = op.ranks or self.world.size
        within = self.world.rank < min(count, self.world.size)
        # Servers follow the first worker in the library; here, ranks without results
        # are last.
        serves = self.world.rank >= min(count, self.world.size) - (op.servers or 0)
        place = 0 if not self.world.rank else 1 if serves else 2
        self.comm = self.world.Split(int(not within), place)
        if not within:
            # Groups of wrong sizes are an error only on the ranks of the program.
            self.over = op.way == "groups" and not min(self.world.allgather(True))
            return ABSENT
        settings = hs.Settings(
            non_finite=op.non_finite,
            divergence=op.divergence,
            warn_seconds=_FAR_SECONDS,
            limit_seconds=_FAR_SECONDS,
            summary="off",
        )
        self._keeps_snapshots = bool(op.snapshots)
        options = {"on_error": op.on_error or "abort", "settings": settings}
        if op.way in ("served", "shared"):
            if op.way == "shared":
                self.workers = self.comm.Split(int(serves), self.world.rank)
            self.strategy = _module("served").made(self, op, settings)
            return ABSENT if self.strategy is None else None
        if op.way == "groups":
            self.strategy = _module("grouped").made(self, op, **options)
            return None
        kinds = (hs.MultiWorkerMirroredStrategy, hs.CentralStorageStrategy)
        self.strategy = kinds[op.way == "central"](
            comm=self.comm,
            replicas_per_worker=op.per_worker,
            **self._inside(op),
            cross_device_ops=getattr(hs, op.ops)() if op.ops else None,
            **options,
        )
        return None

    def _inside(self, op: Op) -> dict[str, int]:
        each = ranks_per_replica(op, self.comm.size)
        return {} if each == 1 else {"ranks_per_replica": each}

    def _restart(self, op: Op) -> Any:
        declared, self._declared = self._declared, []
        self.end()
        absent = self._strategy(op) == ABSENT
        self._manager = None
        if absent:
            self._declared = declared
            return ABSENT
        for one in declared:
            self.do(one)
        if not self.strategy.saves_checkpoints:
            # The first worker restores for all workers.
            self._wait_for_workers()
            return [self._saves, {}]
        try:
            step = self._checkpoints().restore(per_replica=op.per_replica or "error")
        finally:
            self._wait_for_workers()
        return [step, {name: state.value for name, state in self.states.items()}]

    def _wait_for_workers(self) -> None:
        """Wait until all workers that share variables have arrived."""
        if self.workers is not None:
            self.workers.Barrier()

    def end(self) -> None:
        """Close the strategy, in whatever state it is."""
        self._numpy.close()
        if self.workers is not None:
            self.workers.Free()
            self.workers = None
        if self.groups is not None:
            self.groups.close()
        elif isinstance(self.strategy, hs.ParameterServerStrategy):
            self.strategy.close()
        elif self.strategy is not None:
            settle(self.strategy, self.comm)
        self.strategy = self.groups = None
        if self.comm is not None:
            self.comm.Free()
            self.comm = None

    def _variable(self, op: Op) -> None:
        self._declared.append(op)
        with self.strategy.scope():
            self.variables[op.id] = hs.Variable(
                op.start.value(0),
                name=op.name,
                synchronization=op.sync or "auto",
                aggregation=op.aggregation or "none",
                trainable=op.trainable,
            )

    def _optimizer(self, op: Op) -> None:
        self._declared.append(op)
        with self.strategy.scope():
            optimizer = getattr(hs.optimizers, op.rule)(**op.options)
        self.optimizers[op.id] = optimizer
        # A group whose first step fails could otherwise not be saved with the others.
        if op.build or self.groups is not None:
            optimizer.build([self.variables[name] for name in op.over])

    def _metric(self, op: Op) -> None:
        self._declared.append(op)
        with self.strategy.scope():
            self.metrics[op.id] = getattr(hs.metrics, op.rule)(name=op.id)

    def _state(self, op: Op) -> None:
        self._declared.append(op)
        # After a save, declare another value, which a restore must replace.
        value = op.value if self._saves == 0 else None
        self.states[op.id] = PlainState(value)

    def _dataset(self, op: Op) -> None:
        self._declared.append(op)
        strategy = self.everyone
        if op.form == "function":
            made = strategy.distribute_datasets_from_function(
                lambda context: iterable_of(op, context)
            )
        elif op.form == "rows":
            rows = hs.Dataset(
                rows_of(op), op.batch, shuffle=bool(op.shuffle), seed=op.seed or 0
            )
            made = strategy.experimental_distribute_dataset(rows)
        else:
            made = strategy.experimental_distribute_dataset(iterable_of(op, None))
        self.datasets[op.id] = made

    def _checkpoints(self) -> Any:
        if self._manager is None:
            rows = {
                name: dataset
                for name, dataset in self.datasets.items()
                if hasattr(dataset, "restore_state")
            }
            things = {**self.optimizers, **self.metrics, **rows, **self.states}
            if self.groups is not None:
                things["groups"] = self.groups
            if self.variables:
                things["values"] = self.variables
            options = None
            if self._keeps_snapshots:
                options = hs.CheckpointOptions(memory=1, every=_NEVER)
            with self.strategy.scope():
                self._manager = hs.CheckpointManager(
                    self._folder, options=options, **things
                )
        return self._manager

    def _save(self, op: Op) -> int:
        manager = self._checkpoints()
        save = manager.save_if_due if op.if_due else manager.save
        save(self._saves, asynchronous=bool(op.background))
        manager.wait()
        return self._saves

    def _reduce(self, op: Op) -> Any:
        value = self.arrays(op)
        out: Any = None
        if op.out == "self":
            out = value
        elif op.out == "new":
            out = {name: np.zeros_like(part) for name, part in value.items()}
        elif op.out == "overlap":
            first, second = list(value.values())[:2]
            memory = np.zeros(first.size + second.size - 1, first.dtype)
            parts = memory[: first.size], memory[first.size - 1 :]
            out = dict(zip(value, parts, strict=True))
        if op.axis is not None:
            (value,) = value.values()
        return self._call(
            op, lambda: self.strategy.reduce(op.how, value, op.axis, out=out)
        )

    def _call(self, op: Op, call: Callable[[], Any]) -> Any:
        if not op.thread:
            return call()
        found: list[Any] = []

        def work() -> None:
            try:
                found.append((True, call()))
            except BaseException as error:
                found.append((False, error))

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        good, value = found[0]
        if good:
            return value
        raise value

    def arrays(self, op: Op) -> dict[str, Any]:
        """Return this rank's values for a call, perhaps with a planted wrong value."""
        ragged = op.axis is not None or op.kind in ("gather", "all_gather")
        value = {
            f"v{index}": draw.value(self.rank, ragged=ragged)
            for index, draw in enumerate(op.values)
        }
        if self.struck(op) and op.fault[0] in ("text", "interrupt"):
            wrong = np.array("text") if op.fault[0] == "text" else Interrupting()
            value["v0"] = wrong
        return value

    def _gather(self, op: Op) -> Any:
        value = self.arrays(op)
        return self._call(op, lambda: self.strategy.gather(value, 0))

    def _threads(self, op: Op) -> list[Any]:
        """Reduce in two threads at once; return the result of each thread."""
        gate = threading.Barrier(2)
        found: list[Any] = [None, None]

        def work(index: int, value: Any) -> None:
            gate.wait()
            try:
                found[index] = np.array(self.strategy.reduce("sum", value))
            except Exception as error:
                found[index] = f"{type(error).__name__}: {error}"

        values = [draw.value(self.rank) for draw in op.values]
        threads = [threading.Thread(target=work, args=one) for one in enumerate(values)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _assign(self, op: Op) -> None:
        value = op.value.value(0)
        if self.struck(op):
            value = np.zeros((*value.shape, 2), value.dtype)
        getattr(self.variables[op.var], op.method)(value, read_value=False)

    def _rows(self, op: Op) -> None:
        values = op.value.value(0)
        rows = hs.IndexedSlices(values, np.array(op.indices[0]))
        getattr(self.variables[op.var], op.method)(rows)

    def _read(self, op: Op) -> Any:
        return self.variables[op.var].numpy()

    def _progress(self, op: Op) -> list[int]:
        optimizer = self.optimizers[op.optimizer]
        return [int(optimizer.iterations.numpy()), optimizer.skipped_steps]

    def _result(self, op: Op) -> Any:
        return self.metrics[op.metric].result()

    def _reset(self, op: Op) -> None:
        self.metrics[op.metric].reset_state()

    def _barrier(self, op: Op) -> None:
        self.strategy.barrier()

    def _hang(self, op: Op) -> None:
        """Hang on one rank; only the fuzzer's own tests use this operation."""
        if self.rank == 0:
            time.sleep(_FAR_SECONDS)
        self.strategy.barrier()

    def _check(self, op: Op) -> None:
        self.strategy.check_divergence()

    def _differ(self, op: Op) -> None:
        """Change one rank's copy of a variable, and check that this is detected."""
        if isinstance(self.strategy, hs.CentralStorageStrategy):
            # The ranks of a worker share one copy, which is read-only.
            return
        component = self.variables[op.var].component
        before = component.copy()
        if self.struck(op):
            component += 1
        try:
            self.strategy.check_divergence()
        finally:
            component[...] = before

    def _errors(self, op: Op) -> None:
        self._numpy.enter_context(np.errstate(all=op.all))

    def _run(self, op: Op) -> Any:
        return self.strategy.run(step_of(self, op))

    def _epoch(self, op: Op) -> Any:
        """Iterate over a dataset; return rows and body's results of each step."""
        steps: list[Any] = []
        for number, batch in enumerate(self.datasets[op.dataset]):
            if op.fault and op.fault[2] == number and self.struck(op):
                continue
            own = np.array(self.strategy.local_value(batch))
            ran = self.strategy.run(step_of(self, op), args=(batch,))
            rows = self.strategy.gather(batch, 0) if op.gathers else None
            steps.append([own, self.seen(ran), rows])
            if op.steps is not None and number + 1 >= op.steps:
                break
        return steps

    def clear(self) -> None:
        """Remove the checkpoints; called on one rank."""
        shutil.rmtree(self._folder, ignore_errors=True)


def settle(strategy: Any, comm: Any) -> None:
    """Close a strategy; if it is broken, leave it as at the end of a process.

    Collective over ``comm``, which the library does not use.
    """
    channel = strategy.collectives.channel
    outcome: str | None = ""
    if channel is not None and not channel.failures.broken:
        # Announce the exit, because the others may wait for a call that this rank
        # lacks.
        channel.post_leave()
        outcome = channel.poll_leave()
        while outcome is None:
            time.sleep(0)
            outcome = channel.poll_leave()
    fine = channel is None or not (outcome or channel.failures.broken)
    if min(comm.allgather(fine)):
        strategy.close()
    else:
        strategy.abandon()
