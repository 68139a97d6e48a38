"""Pretend nodes, a program whose state is known, and watchers that write snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.elastic.watching.node_programs import NodePrograms, give_up
from tests.mpi.ranks.saved import Counter, fill, make_variable


class Nodes:
    """Pretend nodes: each rank's node has a folder of its own in the memory."""

    def __init__(self, root: Path, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.job, self._patch = root, job, monkeypatch
        self.count = 0

    def divide(self, count: int) -> None:
        """Divide the ranks into ``count`` nodes."""
        self.count = count
        node = self.job.rank * count // self.job.size
        path = self.root / f"node-{node}"
        path.mkdir(exist_ok=True)
        self._patch.setenv("HPCSTRAT_WATCH_MEMORY", str(path))

    def program(self, strategy: Any, count: int, *shape: int) -> Program:
        """Divide the ranks into ``count`` nodes, and return a program of this shape."""
        self.divide(count)
        return Program(strategy, *shape)

    def files(self, node: int, slot: int) -> tuple[Path, Path]:
        """Return the paths of data and record, which may not exist."""
        found = [*(self.root / f"node-{node}").glob("hpcstrat-*")]
        folder = found[0] if found else self.root / "nothing"
        return folder / f"slot-{slot}.data", folder / f"slot-{slot}.record"

    def said(self) -> str:
        """Return the output of all writers."""
        return "".join(path.read_text() for path in self.root.glob("output-*"))


class Program:
    """A program whose state at each step is known."""

    def __init__(self, strategy: Any, num_rows: int, num_weights: int) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = hs.Variable(np.zeros(num_weights))
            self.small = hs.Variable(np.zeros(3, np.float32))
            self.rows = make_variable("none", np.zeros(num_rows))
            self.total = make_variable("sum", np.zeros(2, np.int64))
        self.counter = Counter()

    def objects(self) -> dict[str, Any]:
        names = "weights", "small", "rows", "total", "counter"
        return {name: getattr(self, name) for name in names}

    def manager(self, folder: Path, **options: Any) -> hs.CheckpointManager:
        """Return a manager of this program's objects, which keeps snapshots."""
        rules = hs.CheckpointOptions(**{"memory": 1, "every": 10**6, **options})
        return hs.CheckpointManager(folder, options=rules, **self.objects())

    def go_to(self, step: int) -> None:
        """Set the state of a step. Some values are NaN, with bits of their own."""
        self.weights.component.view(np.uint64)[...] = weights_at(step, self.weights)
        fill(self.small, np.float32(step) / 3)
        fill(self.rows, rows_at(step, self.strategy.rank, self.rows))
        fill(self.total, step * (1 + self.strategy.rank))
        self.counter.state = {"steps": step}

    def check(self, step: int, saved_by: int) -> None:
        """Compare each byte with the state of a step of ``saved_by`` replicas."""
        found = self.weights.component.view(np.uint64)
        np.testing.assert_array_equal(found, weights_at(step, self.weights))
        assert (self.small.component == np.float32(step) / 3).all()
        row = rows_at(step, self.strategy.rank % saved_by, self.rows)
        assert self.rows.component.tobytes() == row.tobytes()
        total = self.strategy.reduce("sum", self.total.component, axis=None)
        assert (total == step * saved_by * (saved_by + 1) // 2).all()
        assert self.counter.state == {"steps": step}


def weights_at(step: int, weights: Any) -> Any:
    # The highest bits of some of these words are those of NaN.
    index = np.arange(weights.component.size, dtype=np.uint64)
    return index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(step)


def rows_at(step: int, rank: int, rows: Any) -> Any:
    return np.arange(rows.component.size) * 0.5 + step + 1000 * rank


class Watchers:
    """Watchers of pretend nodes, as threads of rank 0, which start real writers.

    ``kill_after`` is a time after which a random writer of each save is killed.
    """

    def __init__(self, nodes: Nodes, num_spare: int = 0) -> None:
        self.root, self.job, self._patch = nodes.root, nodes.job, nodes._patch
        self.folder = self.root / "watch"
        self.names = [f"n{number}" for number in range(nodes.count + num_spare)]
        self.kill_after: float | None = None
        self._random = random.Random(nodes.count)
        self._kills: list[threading.Timer] = []
        self._is_over = threading.Event()
        self._programs: list[NodePrograms] = []
        node = self.job.rank * nodes.count // self.job.size
        self._settings = {
            "HPCSTRAT_WATCH_FOLDER": str(self.folder),
            "HPCSTRAT_WATCH_RUN": "abc",
            "HPCSTRAT_WATCH_JOB": "test",
            "HPCSTRAT_WATCH_ADDRESS": "127.0.0.1",
            "HPCSTRAT_WATCH_SOCKET": str(self.root / "socket"),
        }
        for name, value in self._settings.items():
            self._patch.setenv(name, value)
        self._patch.setenv("HPCSTRAT_WATCH_NODE", self.names[node])
        if self.job.rank == 0:
            self.folder.mkdir(exist_ok=True)
            for number in range(nodes.count, len(self.names)):
                (self.root / f"node-{number}").mkdir()
        self.begin(1)

    def begin(self, generation: int, lost: int = 0) -> None:
        """Begin a generation without the last nodes; collective."""
        self.job.Barrier()
        self._patch.setenv("HPCSTRAT_WATCH_GENERATION", str(generation))
        if self.job.rank == 0:
            claim = {"members": self.names[: len(self.names) - lost]}
            (self.folder / f"gen-{generation}").write_text(json.dumps(claim))
        self.job.Barrier()

    def kill_no_more(self) -> None:
        """Wait until the writers of earlier saves have been killed; collective."""
        self.kill_after = None
        for kill in self._kills:
            kill.join()
        self.job.Barrier()

    def save_newest(self, number: int, names: list[str]) -> None:
        """Save the newest snapshot of some nodes, on rank 0 in a `watching` block."""
        for name, programs in zip(self.names, self._programs, strict=True):
            if name in names:
                programs.save_newest(number, names)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in a block; at its end, the writers have ended. Collective."""
        if self.job.rank:
            yield
            self.job.Barrier()
            return
        self._is_over.clear()
        self._programs.clear()
        for number, name in enumerate(self.names):
            memory = {"HPCSTRAT_WATCH_MEMORY": str(self.root / f"node-{number}")}
            env = {**os.environ, **memory, "HPCSTRAT_WATCH_NODE": name}
            env.pop("HPCSTRAT_WATCH_GENERATION")
            output = self.root / f"output-{name}"
            self._programs.append(NodePrograms("abc", env, output))
        server = socket.socket(socket.AF_UNIX)
        server.bind(self._settings["HPCSTRAT_WATCH_SOCKET"])
        server.listen()
        server.settimeout(0.01)
        thread = threading.Thread(target=self._serve, args=(server,))
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()
            server.close()
            os.unlink(self._settings["HPCSTRAT_WATCH_SOCKET"])
        self.job.Barrier()

    def _serve(self, server: socket.socket) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                line, _ = server.accept()
                with line, line.makefile() as lines:
                    told = json.loads(lines.readline())
                if told["kind"] == "save":
                    self._save(told)
            self._see_ends()
        for programs in self._programs:
            programs.end_writer()
        while any(programs.has_writer for programs in self._programs):
            self._see_ends()

    def _save(self, told: dict[str, Any]) -> None:
        for name, programs in zip(self.names, self._programs, strict=True):
            if name in told["nodes"]:
                order = self.folder / told["order"]
                try:
                    programs.save(order, told["nodes"])
                except OSError:
                    # As a watcher does: the writer was killed in this moment.
                    give_up(order)
        if self.kill_after is not None:
            programs = self._random.choice(self._programs)
            self._kills.append(threading.Timer(self.kill_after, _kill, [programs]))
            self._kills[-1].start()

    def _see_ends(self) -> None:
        time.sleep(0.001)
        for programs in self._programs:
            programs.look_at_writer()


def _kill(programs: NodePrograms) -> None:
    if programs._writer is not None:
        programs._writer.kill()
