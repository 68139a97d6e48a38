"""Watched runs of the survivor program on pretend hosts, and the judgement of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcstrat.testing.launcher import clean_environment
from tests.cluster import survivor
from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm

HPCSTRAT = str(Path(sys.executable).with_name("hpcstrat"))


class SurvivorRun:
    """What is known of a run of the survivor program on pretend hosts.

    ``folder`` has the ranks' files, ``watch_folder`` those of the watchers. A run may
    have another program that writes the same lines.
    """

    hosts: Hosts
    program: str = survivor.__file__
    folder: Path
    watch_folder: Path
    steps: int

    def claims(self) -> list[dict[str, Any]]:
        """Return the claims so far, in order."""
        found = []
        for path in self.watch_folder.glob("gen-*"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(path.read_text()))
        return sorted(found, key=lambda claim: claim["number"])

    def records(self) -> Iterator[tuple[int, int, list[str]]]:
        """Yield generation, rank and words of each line that a rank wrote."""
        for path in self.folder.glob("steps-*"):
            _, number, rank = path.name.split("-")
            for line in path.read_text().splitlines():
                if len(words := line.split()) == 4:
                    yield int(number), int(rank), words

    def first_step_after(self, moment: float) -> float | None:
        """Return when a generation that began later made its first step."""
        times: dict[int, list[float]] = {}
        for number, _, words in self.records():
            if words[1] == "step":
                times.setdefault(number, []).append(float(words[0]))
        later = [min(some) for some in times.values() if min(some) > moment]
        return min(later, default=None)

    def wait(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        """Return the first true result of a function, or fail with the logs."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if result := what():
                return result
            time.sleep(0.02)
        raise AssertionError(f"{what} is not true after {seconds} s\n{self.logs()}")

    def logs(self) -> str:
        """Return the end of all watchers' logs, and of the output."""
        paths = sorted(self.watch_folder.glob("log-*"))
        lines = [line for path in paths for line in path.read_text().splitlines()]
        errors = [p.read_text()[-500:] for p in self.folder.glob("errors-*")]
        output = [p.read_text()[-1500:] for p in self.watch_folder.glob("output-*")]
        return "\n".join([*sorted(lines), *output, *errors])

    def ranks(self) -> dict[int, str]:
        """Return process ids of ranks, with their command lines."""
        processes = self.hosts.processes()
        return {
            pid: words
            for pid, words in processes.items()
            if Path(words.split(" ")[0]).name.startswith("python")
            and self.program in words
            and " watch " not in words
            and "child_start" not in words
        }

    def launchers(self) -> list[int]:
        """Return process ids of the launchers of ranks."""
        names = ("mpirun", "prterun", "srun", "mpiexec", "mpiexec.hydra")
        return [
            pid
            for pid, command in self.hosts.processes().items()
            # The launcher of Open MPI's wheel is a program of Python. After the end of
            # the srun of the watchers, the job script requeues the job.
            if any(Path(word).name in names for word in command.split()[:2])
            and "hpcstrat watch" not in command
        ]

    def problems(self) -> list[str]:
        """Return everything that is wrong with what the ranks did so far."""
        found: list[str] = []
        steps: dict[tuple[int, int], list[float]] = {}
        for number, rank, words in self.records():
            if words[1] == "step":
                steps.setdefault((number, rank), []).append(float(words[0]))
            elif words[3] != "True":
                found.append(f"generation {number}, rank {rank} restored {words}")
        for (number, rank), moments in steps.items():
            newer = [min(some) for key, some in steps.items() if key[0] > number]
            # A rank that was frozen may end the step that it was making.
            if sum(moment > min(newer, default=moment) for moment in moments) > 1:
                found.append(
                    f"generation {number}, rank {rank} made steps after a newer one"
                )
        if len({c["number"] for c in self.claims()}) != len(self.claims()):
            found.append("a generation was claimed twice")
        return found

    def check_result(self) -> None:
        """Fail unless the result is that of an undisturbed run."""
        right = zlib.crc32(survivor.state_after(self.steps).tobytes())
        assert (self.folder / "result").read_text() == str(right)
        assert (self.watch_folder.parent / "done").exists()


class WatchedRun(SurvivorRun):
    """A run of the survivor program under watchers, one on each of some hosts."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        *options: str,
        use: int = 2,
        steps: int = 1_000_000,
        nap: float = 0.005,
        nodes: Sequence[str] = (),
        program: Sequence[str] = (survivor.__file__,),
        binds: bool = False,
    ) -> None:
        self.hosts, self.folder, self.steps = hosts, folder, steps
        self.program, *more = program
        folder.mkdir(parents=True, exist_ok=True)
        self.watch_folder = folder / "watch"
        self.nodes = nodes or [f"node{i + 1}" for i in range(hosts.num_hosts)]
        env = {
            **clean_environment(),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_coll": "^han",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RUN_FOLDER": str(folder),
        }
        if not binds:
            env["PRTE_MCA_hwloc_default_binding_policy"] = "none"
        # With another mapping, all ranks may be on the first host.
        env.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
        command = [self.program, str(folder), str(steps), str(nap), *more]
        program = [sys.executable, *command]
        words = ["--nodes", ",".join(self.nodes), "--use", str(use), *options, "--"]
        self.watchers = {}
        for node in self.nodes:
            command = [str(hosts.folder / "hx"), node, HPCSTRAT, "watch"]
            command += ["--job", f"test of {self.nodes[0]}", *words, *program]
            with (folder / f"errors-{node}").open("wb") as errors:
                self.watchers[node] = subprocess.Popen(command, env=env, stderr=errors)

    def end(self) -> None:
        """End the watchers, and with them everything that they have started."""
        for watcher in self.watchers.values():
            if watcher.poll() is None:
                watcher.send_signal(signal.SIGKILL)
        for watcher in self.watchers.values():
            watcher.wait(20)


class SlurmRun(SurvivorRun):
    """A job of Slurm that runs the survivor program by ``jobs/survive.sbatch``."""

    def __init__(
        self,
        slurm: Slurm,
        folder: Path,
        *,
        spare: int,
        steps: int = 1_000_000,
        nap: float = 0.005,
        program: Sequence[str] = (survivor.__file__,),
        **options: Any,
    ) -> None:
        self.program, *more = program
        self.hosts, self.folder, self.steps = slurm, folder / "ranks", steps
        self.folder.mkdir(parents=True)
        words = [self.program, str(self.folder), str(steps), str(nap), *more]
        each = {"ntasks_per_node": 1, "nodes": slurm.num_hosts, "SPARE_NODES": spare}
        self.job = slurm.submit(folder, "survive.sbatch", *words, **{**each, **options})
        run = folder / f"runs/survive-{self.job.number}"
        self.watch_folder = run / "watch"

    def end(self) -> None:
        """Cancel the job, if it runs."""
        slurm = self.job.slurm
        slurm.command("scancel", str(self.job.number))
        self.job.wait_to_end()
