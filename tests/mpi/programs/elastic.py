"""Train to the end although ranks are killed: ``elastic.py FOLDER OPTIONS`` (JSON).

The expected result does not depend on the number of replicas: ``ledger`` counts how
often each row was used, ``total`` is exact, ``weights`` is right up to rounding. The
ranks write their process numbers into FOLDER. The first replica also writes the time at
which training continued after a loss.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs

ROWS, WIDTH, BATCH = 96, 5, 12


class Kills:
    """The places and steps at which this rank kills itself."""

    def __init__(self, rank: int, wanted: list[dict[str, Any]]) -> None:
        self.calls = 0
        self._wanted = [kill for kill in wanted if kill["rank"] == rank]

    def at(self, where: str, step: int) -> None:
        """Kill this rank if a kill was requested for this place and step."""
        for kill in self._wanted:
            here = kill["where"] == where and step >= kill.get("step", 0)
            if here and self.calls >= kill.get("call", 1):
                die()


def die() -> None:
    """Kill this process without any message to the other ranks."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class DyingArray:
    """Rows of a dataset that may kill the rank when they are read."""

    def __init__(self, rows: Any, kills: Kills) -> None:
        self._rows, self._kills = rows, kills
        self.shape, self.dtype, self.ndim = rows.shape, rows.dtype, rows.ndim
        self.step = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        self._kills.at("dataset", self.step)
        return self._rows[key]


class Counter:
    """A counter of steps, as an example of a program's own state."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def make_train(folder: Path, options: dict[str, Any], kills: Kills) -> Any:
    """Return the training function that `hs.elastic.run` calls."""
    epochs, pause = options.get("epochs", 2), options.get("pause", 0.0)

    def train(strategy: Any, memory: Any) -> dict[str, Any]:
        kills.calls += 1
        (folder / "started").touch()
        kills.at("start", 0)
        with strategy.scope():
            weights = hs.Variable(np.zeros(WIDTH), name="weights")
            kills.at("setup", 0)
            summed: Any = {"dtype": "int64", "aggregation": "sum"}
            ledger = hs.Variable(np.zeros(ROWS, np.int64), name="ledger", **summed)
            total = hs.Variable(0, name="total", **summed)
            on_read = {"synchronization": "on_read", "dtype": "int64"}
            seen = hs.Variable(0, aggregation="sum", name="seen", **on_read)
            first = hs.Variable(
                0, aggregation="only_first_replica", name="first", **on_read
            )
            each = hs.Variable(0, aggregation="none", name="each", **on_read)
            mean = hs.Variable(
                0.0, aggregation="mean", synchronization="on_read", name="mean"
            )
            steps = options.get("accumulate_steps", 1)
            optimizer = hs.optimizers.SGD(0.01, 0.9, accumulate_steps=steps)
        rows = np.arange(ROWS * WIDTH, dtype=np.float64).reshape(ROWS, WIDTH)
        rows = DyingArray(rows, kills)
        noise = strategy.random("noise", seed=5)
        dataset = strategy.experimental_distribute_dataset(
            hs.Dataset({"x": rows, "id": np.arange(ROWS)}, BATCH, shuffle=True)
        )
        counter = Counter()
        memory.track(
            weights=weights,
            ledger=ledger,
            sums={"total": total, "seen": seen, "first": first, "each": each},
            mean=mean,
            optimizer=optimizer,
            dataset=dataset,
            noise=noise,
            counter=counter,
        )
        kills.at("restore", 0)
        restored = memory.restore()
        step = restored or 0
        if memory.state:
            assert memory.state == {"text": f"step {step}"}, memory.state
        assert counter.steps == step
        if step == 0 and options.get("commit_first"):
            memory.commit(0, text="step 0")
        resumed = kills.calls > 1 or restored is not None

        def update(batch: Any) -> None:
            context = hs.get_replica_context()
            ids = np.bincount(batch["id"], minlength=ROWS).astype(np.int64)
            ledger.assign_add(ids)
            kills.at("reduce", step)
            total.assign_add(np.int64(batch["id"].sum() * (step + 1)))
            if options.get("large"):
                context.all_reduce("sum", np.ones(options["large"]))
            share = noise.shared.random() / strategy.num_replicas_in_sync
            gradient = batch["x"].sum(axis=0) / 1000 + share
            optimizer.apply_gradients([(gradient, weights)])
            seen.assign_add(np.int64(len(batch["id"])))
            first.assign_add(np.int64(1))
            each.assign_add(np.int64(1))
            mean.assign_add(1.0)
            noise.generator.random()

        while dataset.epoch < epochs:
            for batch in dataset:
                rows.step = step
                kills.at("between", step)
                strategy.run(update, args=(batch,))
                step += 1
                counter.steps = step
                if resumed and strategy.replica_id == 0:
                    _note(folder / "resumed", f"{time.time()} {step}")
                    resumed = False
                if step % options.get("every", 1) == 0:
                    memory.commit(step, text=f"step {step}")
                kills.at("commit", step)
                time.sleep(pause)
        kills.at("end", step)
        draws = strategy.run(lambda: np.array([noise.generator.random()]))
        with strategy.scope():
            return {
                "step": step,
                "weights": weights.numpy().tolist(),
                "ledger": sorted(set(ledger.numpy().tolist())),
                "total": int(total.numpy()),
                "seen": int(seen.numpy()),
                "first": int(first.numpy()),
                "mean": float(mean.numpy()),
                "replicas": strategy.num_replicas_in_sync,
                "workers": strategy.topology.num_workers,
                "draws": strategy.gather(draws, 0).tolist(),
                "bits": weights.numpy().tobytes().hex(),
            }

    return train


def _note(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def main() -> None:
    """Run the training, and write the result on the first active rank."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    (folder / f"{rank}.process").write_text(str(os.getpid()))
    kills = Kills(rank, options.get("kills", []))
    result = hs.elastic.run(
        make_train(folder, options, kills),
        completion_marker=folder / "done",
        **options.get("run", {}),
    )
    kills.at("after", 0)
    if result is not None:
        (folder / f"{rank}.result").write_text(json.dumps(result))
    print("rank", rank, "ends", flush=True)


if __name__ == "__main__":
    main()
