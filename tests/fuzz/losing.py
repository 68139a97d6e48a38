"""Random programs in which a rank is killed, each run in a job and checked.

``python -m tests.fuzz.losing FOLDER PLAN`` is one rank of such a job.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.arithmetic import Rule, clip

__all__ = ["attempt", "expected", "plan_of"]

_PLACES = ("before run", "before apply", "after apply", "after run", "commit")
_WIDTH = 3
_LIMIT_SECONDS = 100.0


def plan_of(seed: int) -> dict[str, Any]:
    """Return the plan of a seed, which consists of numbers and texts."""
    draw = random.Random(seed)
    batch = draw.randrange(3, 9)
    rows = batch * draw.randrange(4, 9) + draw.randrange(batch)
    steps = 2 * -(-rows // batch)
    optimizers: list[tuple[str, dict[str, Any]]] = [
        ("SGD", {"learning_rate": 0.25}),
        ("SGD", {"learning_rate": 0.25, "momentum": 0.5}),
        ("Adam", {"learning_rate": 0.125}),
        ("Adagrad", {"learning_rate": 0.5}),
    ]
    rule, options = draw.choice(optimizers)
    n = draw.choice((3, 4))
    tolerant = draw.random() < 0.5
    return {
        "seed": seed,
        "n": n,
        "rows": rows,
        "batch": batch,
        "rule": rule,
        "options": options,
        "accumulate": draw.randrange(1, 5),
        "clip": draw.choice((None, None, 64.0)),
        "every": draw.randrange(1, 4),
        "rank": draw.randrange(n),
        "step": draw.randrange(steps),
        "place": draw.choice(_PLACES),
        # Steps that all replicas skip, because one replica fails.
        "bad": sorted(draw.sample(range(steps), 2)) if tolerant else [],
        # Steps without a gradient for the second variable.
        "without": sorted(draw.sample(range(steps), steps // 3)),
        "run": {
            "replicas_per_worker": draw.choice((1, 1, 2)),
            "spare_ranks": draw.choice((0, 0, 1)),
            "partner_copies": True,
            "on_error": "raise" if tolerant else "abort",
        },
    }


def expected(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the undisturbed program, computed in one process."""
    rule = Rule(plan["rule"], plan["options"])
    values = [np.zeros(_WIDTH), np.ones(_WIDTH)]
    states = [rule.start(value) for value in values]
    sums: list[Any] = [None, None]
    rows, step, calls, iterations, seen = np.arange(plan["rows"]), 0, 0, 0, 0
    for _ in range(2):
        for start in range(0, plan["rows"], plan["batch"]):
            batch = rows[start : start + plan["batch"]]
            if step not in plan["bad"]:
                seen += len(batch)
                calls += 1
                for index in range(2 - (step in plan["without"])):
                    gradient = np.full(_WIDTH, batch.sum() / 8 * (index + 1))
                    total = sums[index]
                    sums[index] = gradient if total is None else total + gradient
                if calls == plan["accumulate"]:
                    iterations += 1
                    present = [index for index in (0, 1) if sums[index] is not None]
                    used = [sums[index] for index in present]
                    used = clip(used, plan["clip"]) if plan["clip"] else used
                    for index, gradient in zip(present, used, strict=True):
                        values[index] = rule.step(
                            *(values[index], gradient, states[index], iterations)
                        )
                    sums, calls = [None, None], 0
            step += 1
    return {
        "step": step,
        "iterations": iterations,
        "seen": seen,
        "values": [value.tolist() for value in values],
    }


def attempt(seed: int) -> str:
    """Run the program of a seed; return a description of an error, or an empty text."""
    from hpcstrat.testing import launch_command
    from hpcstrat.testing.job import Job
    from tests.mpi.programs.started import environment

    plan = plan_of(seed)
    words = [sys.executable, "-m", "tests.fuzz.losing"]
    launch = launch_command(plan["n"], fault_tolerant=True)
    with tempfile.TemporaryDirectory(prefix="hpcstrat-fuzz-") as name:
        folder = Path(name)
        command = [*launch, *words, name, json.dumps(plan)]
        job = Job(command, folder, environment())
        try:
            returncode = job.wait(_LIMIT_SECONDS)
            if returncode is None:
                job.show_stacks()
            results = [json.loads(p.read_text()) for p in folder.glob("*.result")]
            marked = (folder / "done").exists()
            said = f"{job.stdout}\n{job.stderr}"[-6000:]
        finally:
            job.end()
    problem = _compared(results, expected(plan))
    if returncode is None or not marked:
        problem = f"{returncode=}, completion marker {marked}; {problem}"
    return f"{plan}: {problem}\n{said}" if problem else ""


def _compared(results: list[dict[str, Any]], wanted: dict[str, Any]) -> str:
    if not results:
        return "no rank came to an end"
    found = []
    for key in ("step", "iterations", "seen"):
        values = [result[key] for result in results]
        if any(value != wanted[key] for value in values):
            found.append(f"{key} is {values}, not {wanted[key]}")
    if any(result["values"] != results[0]["values"] for result in results):
        found.append(f"replicas differ: {[r['values'] for r in results]}")
    values = results[0]["values"]
    if not np.allclose(values, wanted["values"], rtol=1e-12, atol=1e-12):
        found.append(f"values are {values}, not {wanted['values']}")
    return "; ".join(found)


class _Rank:
    """The program on one rank."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder, self.plan, self.entries = folder, plan, 0
        self.rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))

    def die(self, place: str, step: int) -> None:
        """Kill this process if the plan says so for this place and step."""
        plan = self.plan
        here = (plan["rank"], plan["place"], plan["step"]) == (self.rank, place, step)
        if here and self.entries == 1:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_LIMIT_SECONDS)

    def train(self, strategy: Any, memory: Any) -> dict[str, Any]:
        """Train to the last step; called again after a loss."""
        import hpcstrat as hs

        self.entries += 1
        plan = self.plan
        with strategy.scope():
            first = hs.Variable(np.zeros(_WIDTH), name="first")
            second = hs.Variable(np.ones(_WIDTH), name="second")
            sums: Any = {"synchronization": "on_read", "aggregation": "sum"}
            seen = hs.Variable(0, dtype="int64", name="seen", **sums)
            optimizer = getattr(hs.optimizers, plan["rule"])(
                **plan["options"],
                accumulate_steps=plan["accumulate"],
                clip_global_norm=plan["clip"],
            )
        rows = hs.Dataset(np.arange(plan["rows"]), plan["batch"])
        dataset = strategy.experimental_distribute_dataset(rows)
        memory.track(
            values=[first, second], seen=seen, optimizer=optimizer, dataset=dataset
        )
        step = memory.restore() or 0

        def update(batch: Any) -> None:
            turn = step % strategy.num_replicas_in_sync
            # Other replicas have done their part of the step before this error.
            if step in plan["bad"] and strategy.replica_id == turn:
                raise OSError("planted")
            self.die("before apply", step)
            gradient = np.full(_WIDTH, batch.sum() / 8)
            other = None if step in plan["without"] else 2 * gradient
            optimizer.apply_gradients([(gradient, first), (other, second)])
            self.die("after apply", step)
            if step not in plan["bad"]:
                seen.assign_add(np.int64(len(batch)))

        while dataset.epoch < 2:
            for batch in dataset:
                self.die("before run", step)
                try:
                    strategy.run(update, args=(batch,))
                except OSError:
                    assert step in plan["bad"]
                self.die("after run", step)
                step += 1
                if step % plan["every"] == 0:
                    memory.commit(step)
                self.die("commit", step)
        with strategy.scope():
            return {
                "step": step,
                "iterations": int(optimizer.iterations.numpy()),
                "seen": int(seen.numpy()),
                "values": [first.numpy().tolist(), second.numpy().tolist()],
            }


def main() -> None:
    """Run the program on this rank."""
    import hpcstrat as hs

    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = _Rank(folder, plan)
    result = hs.elastic.run(
        rank.train, completion_marker=folder / "done", **plan["run"]
    )
    if result is not None:
        (folder / f"{rank.rank}.result").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
