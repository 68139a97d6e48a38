"""Programs of a coordinator, in one job, or in separate jobs if they kill ranks.

Rank 0 executes the programs and records its observations; the other ranks serve.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.conformance.launch import Outcome, run_job
from tests.conformance.session import (
    InvalidArgumentError,
    VocabularyError,
    describe_error,
)

__all__ = ["main", "replay_served"]

NUM_SERVERS = 1
# Seconds added to the limits of cases for the launch, which may take even longer.
_START_SECONDS = 20.0
_SLOW_SECONDS = 0.3
_NOTICED_SECONDS = 0.5


def replay_served(
    cases: Sequence[dict[str, Any]], indices: Sequence[int], limit_seconds: float
) -> dict[int, Outcome]:
    """Replay the programs with these indices; return the outcome of each program."""
    groups: dict[Any, list[int]] = {}
    for index in indices:
        alone = any(step["op"] == "kill" for step in cases[index]["program"])
        size = 1 + NUM_SERVERS + cases[index]["replicas"]
        groups.setdefault((size, alone, index if alone else None), []).append(index)
    outcomes: dict[int, Outcome] = {}
    for (size, alone, _), group in groups.items():
        some = [cases[index] for index in group]
        found = _job(some, size, alone, _START_SECONDS + limit_seconds * len(some))
        outcomes.update(zip(group, found, strict=True))
    return outcomes


def _job(
    cases: list[dict[str, Any]], size: int, survives: bool, limit_seconds: float
) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        folder = Path(name)
        job = {"cases": cases, "survives": survives}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        try:
            ended = run_job(
                size,
                "tests.conformance.served",
                name,
                folder=name,
                limit_seconds=limit_seconds,
                survives=survives,
            )
            said = f"exit code {ended.returncode}:\n{ended.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            said = f"hangs: {limit_seconds:g} s"
        outcomes = []
        for number in range(len(cases)):
            path = folder / f"case{number}.json"
            if path.exists():
                record = json.loads(path.read_text(encoding="utf-8"))
                outcomes.append(Outcome([record]))
            else:
                outcomes.append(Outcome([], f"no record; the job's end: {said}"))
        return outcomes


def _plain(value: Any) -> Any:
    """Return a value as JSON values."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def raise_error() -> None:
    """Raise the error that a failed check raises in TensorFlow."""
    raise InvalidArgumentError("the program raises this here")


class _Repeated:
    """A range that repeats without end."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Any:
        return itertools.cycle(range(self._length))


class _Program:
    """One program on the coordinator."""

    def __init__(self, case: dict[str, Any], folder: Path, survives: bool) -> None:
        self.case, self.folder = case, folder
        how = "raise" if survives else "abort"
        self.strategy = hs.ParameterServerStrategy(num_ps=NUM_SERVERS, on_lost_rank=how)
        self.coordinator = hs.coordinator.ClusterCoordinator(self.strategy)
        self.names: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}
        self.pending: Exception | None = None

    def run(self) -> dict[str, Any]:
        """Execute the steps; return the record of each step."""
        records: list[dict[str, Any]] = []
        for step in self.case["program"]:
            record = {"before": {}, "after": {}, "events": [], "replicas": 1}
            records.append(record)
            try:
                with self.strategy.scope():
                    value = self.step(step)
                record["seen"] = _plain(value)
            except Exception as error:
                record["seen"] = describe_error(error)
                if not step.get("continue_after_error"):
                    break
        return {"steps": records}

    def step(self, step: dict[str, Any]) -> Any:
        """Execute a step; return its observation."""
        method = getattr(self, f"op_{step['op']}", None)
        if method is None:
            raise VocabularyError(f"unknown step {step}")
        return method(step)

    def op_ps_variable(self, step: dict[str, Any]) -> None:
        """Make a variable on the servers."""
        dtype = step.get("dtype", "float32")
        name = step["name"]
        self.variables[name] = hs.Variable(step["init"], dtype=dtype, name=name)

    def _function(self, words: dict[str, Any]) -> Callable[..., Any]:
        """Return the function that a step describes."""
        strategy, variables = self.strategy, self.variables
        (word, given), *_ = words.items()
        if word == "assign_add":
            variable, amount = variables[given[0]], given[1]

            def add(value: float = amount) -> float:
                variable.assign_add(value)
                return value

            return add
        if word == "fail":
            return raise_error
        if word == "next":
            return next
        if word == "run_replica":
            return lambda: strategy.run(lambda value: value * 2, args=(given,))
        if word == "slow_return":

            def slow() -> Any:
                time.sleep(_SLOW_SECONDS)
                return given

            return slow
        if word in ("return", "python_callable"):
            return lambda: given
        raise VocabularyError(f"unknown function {words}")

    def op_schedule(self, step: dict[str, Any]) -> None:
        """Schedule a function, once or several times."""
        function = self._function(step["fn"])
        args = [
            self.names[arg["ref"]] if isinstance(arg, dict) and "ref" in arg else arg
            for arg in step.get("args", [])
        ]
        values: list[Any] = []
        for number in range(step.get("times", 1)):
            try:
                values.append(self.coordinator.schedule(function, args))
            except Exception as error:
                if not number:
                    raise
                # One of these functions has already failed. Its error was raised here,
                # before the last schedule; keep it for the next call, such as join.
                self.pending = error
                break
        if "as" in step:
            self.names[step["as"]] = values if "times" in step else values[0]

    def op_join(self, step: dict[str, Any]) -> None:
        """Wait for all scheduled functions."""
        self.coordinator.join()
        if self.pending is not None:
            error, self.pending = self.pending, None
            raise error

    def op_done(self, step: dict[str, Any]) -> bool:
        """Return whether all scheduled functions have ended."""
        return self.coordinator.done()

    def op_fetch(self, step: dict[str, Any]) -> Any:
        """Fetch the results of scheduled functions."""
        return self.coordinator.fetch(self.names[step["ref"]])

    def op_fetch_literal(self, step: dict[str, Any]) -> Any:
        """Fetch a value that is not a result of a function."""
        return self.coordinator.fetch(step["value"])

    def op_read(self, step: dict[str, Any]) -> Any:
        """Read a variable."""
        return self.variables[step["var"]].numpy()

    def op_same_coordinator(self, step: dict[str, Any]) -> bool:
        """Return whether a second coordinator is the same object."""
        second = hs.coordinator.ClusterCoordinator(self.strategy)
        return second is self.coordinator

    def op_per_worker_dataset(self, step: dict[str, Any]) -> None:
        """Make a dataset on each worker, and an iterator over it."""
        length, repeats = step["range"], step.get("repeat", False)
        makes_variable, strategy = step.get("create_variable", False), self.strategy

        def dataset() -> Any:
            if makes_variable:
                with strategy.scope():
                    hs.Variable(0.0)
            return _Repeated(length) if repeats else range(length)

        made = self.coordinator.create_per_worker_dataset(dataset)
        self.names[step["as"]] = iter(made)

    def op_next_in_coordinator(self, step: dict[str, Any]) -> Any:
        """Return the next element of an iterator, on the coordinator."""
        return next(self.names[step["ref"]])

    def op_context_of_dataset_fn(self, step: dict[str, Any]) -> Any:
        """Return the different contexts that dataset functions see."""
        strategy = self.strategy

        def dataset() -> Any:
            def of_context(context: Any) -> Any:
                yield np.array(
                    [
                        context.num_input_pipelines,
                        context.input_pipeline_id,
                        context.num_replicas_in_sync,
                    ]
                )

            return strategy.distribute_datasets_from_function(of_context)

        iterator = iter(self.coordinator.create_per_worker_dataset(dataset))
        seen = self.coordinator.schedule(next, (iterator,)).fetch()
        return [list(map(int, seen))]

    def op_sleep(self, step: dict[str, Any]) -> None:
        """Sleep for some seconds."""
        time.sleep(step["seconds"])

    def op_kill(self, step: dict[str, Any]) -> None:
        """Kill a rank of the given job."""
        first = 1 if step["job"] == "ps" else 1 + NUM_SERVERS
        rank = first + step.get("index", 0)
        path = self.folder / f"rank{rank}.pid"
        os.kill(int(path.read_text(encoding="utf-8")), signal.SIGKILL)
        time.sleep(_NOTICED_SECONDS)

    def op_restart(self, step: dict[str, Any]) -> None:
        """Do nothing, because the other ranks do the work of the lost rank."""


def main() -> None:
    """Execute the programs of the folder on rank 0, or serve on the other ranks."""
    from mpi4py import MPI

    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank, survives = MPI.COMM_WORLD.rank, job["survives"]
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    for number, case in enumerate(job["cases"]):
        if rank:
            how = "raise" if survives else "abort"
            hs.Server(num_ps=NUM_SERVERS, on_lost_rank=how).join()
            continue
        program = _Program(case, folder, survives)
        record = program.run()
        path = folder / f"case{number}.json"
        path.write_text(json.dumps(record), encoding="utf-8")
        program.strategy.close()


if __name__ == "__main__":
    main()
