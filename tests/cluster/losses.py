"""Random losses of ranks, launchers and nodes of watched runs; run this by hand.

``python -m tests.cluster.losses --losses 100 --seed 1 [--slurm] [--kind torch]``: a
program of MPI, or trainings that restore from the memory of nodes. Each episode
has fresh hosts and a fresh run, and several losses. After each loss, some generation
must make a step; at the end, every restored array was right, no generation has made a
step after a newer one, each generation was claimed once, and no process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster import rememberer, survivor
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm
from tests.cluster.watched import SlurmRun, WatchedRun

NUM_HOSTS = 6
# Losses that take a node away, and how many nodes they take.
TAKEN = {
    "node": 1,
    "first node": 1,
    "spare node": 1,
    "two nodes": 2,
    "frozen node": 1,
    "cut node": 1,
    "first node while starting": 1,
    "watcher": 1,
    "frozen first node": 1,
}
KINDS = ("rank", "all ranks", "launcher", "ranks while starting", *TAKEN)


class Episode:
    """Some losses of one run."""

    def __init__(
        self, folder: Path, seed: int, *, slurm: bool, program: Sequence[str]
    ) -> None:
        self.random = random.Random(seed)
        each = self.random.choice((1, 2))
        self.run: WatchedRun | SlurmRun
        if slurm:
            cluster = Slurm(NUM_HOSTS)
            self.hosts: Hosts = cluster
            size = {"spare": NUM_HOSTS - 2, "ntasks_per_node": each, "LEAST_NODES": 1}
            self.run = SlurmRun(cluster, folder, program=program, **size)
        else:
            self.hosts = Hosts(NUM_HOSTS)
            options = ("--least", "1", "--ranks-per-node", str(each))
            self.run = WatchedRun(self.hosts, folder, *options, use=2, program=program)
        self.gone: list[str] = []
        self.stopped: list[tuple[str, str]] = []

    def kill(self, *pids: int) -> None:
        """Kill processes, which may have ended already."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def take(self, node: str, action: str = "off") -> None:
        """Take a node away."""
        self.gone.append(node)
        self.hosts.act(node, action)
        if action in ("freeze", "cut"):
            back = {"freeze": "thaw", "cut": "join"}[action]
            self.stopped.append((node, back))

    def lose(self, kind: str) -> float:
        """Cause a loss, and return its time."""
        claim = self.run.claims()[-1]
        used = claim["nodes"]
        moment = time.time()
        if kind.endswith("while starting"):
            self.kill(*self.run.ranks())
            claim = self.wait_for_claim_after(claim["number"])
            moment = time.time()
        if kind in ("rank", "all ranks", "launcher", "ranks while starting"):
            self.kill(*self.processes_of(kind))
        elif kind == "watcher":
            node = self.random.choice(used)
            self.gone.append(node)
            self.kill_watcher(node)
        else:
            self.take_nodes(kind, claim)
        return moment

    def processes_of(self, kind: str) -> list[int]:
        """Return the processes that a loss kills."""
        # Ranks of older generations are on nodes that are frozen or cut off.
        old = {pid for node in self.gone for pid in self.processes_on(node)}
        ranks = sorted(set(self.run.ranks()) - old)
        launchers = [pid for pid in self.run.launchers() if pid not in old]
        return {
            "rank": self.random.sample(ranks, min(1, len(ranks))),
            "all ranks": ranks,
            "launcher": launchers,
            "ranks while starting": ranks + launchers[:1],
        }[kind]

    def take_nodes(self, kind: str, claim: dict[str, Any]) -> None:
        """Take away the nodes of a loss."""
        used = claim["nodes"]
        spare = [n for n in claim["members"] if n not in used]
        nodes = {
            "node": used[-1:],
            "first node": used[:1],
            "first node while starting": [claim["leader"]],
            "spare node": (spare or used)[-1:],
            "two nodes": used[:2],
            "frozen node": used[-1:],
            "frozen first node": used[:1],
            "cut node": [self.random.choice(used)],
        }[kind]
        action = kind.partition(" ")[0]
        action = {"frozen": "freeze", "cut": "cut"}.get(action, "off")
        for node in nodes:
            self.take(node, action)

    def kill_watcher(self, node: str) -> None:
        """Kill the watcher of a node, and nothing else."""
        found = self.hosts.processes()
        for pid in self.processes_on(node):
            words = found.get(pid, "")
            # After the end of the watchers' srun, the job script requeues the job.
            if "hpcstrat watch" in words and not words.startswith("srun"):
                self.kill(pid)

    def processes_on(self, node: str) -> list[int]:
        """Return the processes of a node."""
        group = self.hosts.folder / f"groups/{node}/cgroup.procs"
        return [int(pid) for pid in group.read_text().split()]

    def wait_for_claim_after(self, number: int) -> dict[str, Any]:
        """Wait for a newer generation, and for a random part of its start."""
        self.run.wait(lambda: self.run.claims()[-1]["number"] > number)
        time.sleep(self.random.uniform(0, 1.5))
        return self.run.claims()[-1]

    def next_kind(self) -> str:
        """Draw a loss that leaves at least two healthy nodes beside those it takes."""
        left = NUM_HOSTS - len(self.gone)
        return self.random.choice([k for k in KINDS if left - TAKEN.get(k, 0) >= 2])

    def bring_back(self) -> None:
        """Let frozen and cut nodes continue, whose ranks must make no step."""
        for node, action in self.stopped:
            # When the node of the job script returns after SlurmdTimeout, Slurm ends
            # the job.
            if not (isinstance(self.run, SlurmRun) and node == "node1"):
                self.hosts.act(node, action)
        self.stopped.clear()

    def end(self) -> list[str]:
        """Bring back all nodes, complete the run, and return all problems."""
        self.bring_back()
        time.sleep(3)
        problems = self.run.problems()
        (self.run.watch_folder.parent / "done").touch()
        self.kill(*self.run.ranks())
        with contextlib.suppress(AssertionError):
            self.run.wait(lambda: not self.left(), 90)
        left = self.left()
        return [*problems, *(f"left: {pid} {words}" for pid, words in left.items())]

    def left(self) -> dict[int, str]:
        """Return the processes that are left, without the daemons of Slurm."""
        found = self.hosts.processes().items()
        return {pid: words for pid, words in found if "slurmd -D" not in words}


def main() -> None:
    """Run episodes until there were enough losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=int, default=100)
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--slurm", action="store_true", help="under the tests' Slurm")
    kinds = ("plain", "numpy", "torch", "jax")
    parser.add_argument("--kind", choices=kinds, default="plain")
    told = parser.parse_args()
    program = [survivor.__file__]
    if told.kind != "plain":
        program = [rememberer.__file__, told.kind]
    folder = told.folder or Path(tempfile.mkdtemp(prefix="losses-"))
    seconds: dict[str, list[float]] = defaultdict(list)
    problems: list[str] = []
    done = restores = number = 0
    while done < told.losses:
        number += 1
        seed = told.seed * 1000 + number
        place = folder / f"episode-{seed}"
        episode = Episode(place, seed, slurm=told.slurm, program=program)
        try:
            episode.run.wait(lambda e=episode: e.run.first_step_after(0))
            for _ in range(told.each):
                time.sleep(episode.random.uniform(0.05, 1.5))
                if episode.random.random() < 0.3:
                    episode.bring_back()
                kind = episode.next_kind()
                moment = episode.lose(kind)
                again = episode.run.wait(
                    lambda e=episode, m=moment, k=kind: (
                        m if k == "spare node" else e.run.first_step_after(m)
                    )
                )
                seconds[kind].append(again - moment)
                done += 1
                print(f"{seed} {kind}: {again - moment:.2f} s", flush=True)
        except AssertionError as error:
            problems.append(f"episode {seed}: {error}")
            print(f"PROBLEM in episode {seed}: {error}", flush=True)
        found = episode.end()
        restores += sum(w[1] == "restored" for _, _, w in episode.run.records())
        problems += [f"episode {seed}: {text}" for text in found]
        for text in found:
            print(
                f"PROBLEM in episode {seed}: {text}\n{episode.run.logs()}", flush=True
            )
        episode.run.end()
        episode.hosts.close()
    for kind, some in sorted(seconds.items()):
        print(
            f"{kind}: {len(some)} losses, median {statistics.median(some):.2f} s, "
            f"{min(some):.2f} to {max(some):.2f} s"
        )
    print(json.dumps({"losses": done, "restores": restores, "problems": len(problems)}))
    raise SystemExit(bool(problems))


if __name__ == "__main__":
    main()
