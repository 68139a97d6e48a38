"""Simulation of traces by SimGrid, a separate program that may not be installed."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from hpcstrat.tools.bench.prediction.platforms import NETWORKS, Network, Platform
from hpcstrat.tools.bench.run_file import BenchError

__all__ = ["Replay", "Simulator", "find_smpirun"]

# SimGrid prints times in whole microseconds, too coarse for one message, so multiply
# all simulated times by this factor.
_SLOWER = 1000.0
_FOUND = re.compile(r"Simulation time ([0-9.]+)")
# Use only our measurements. Turn off bandwidth for acknowledgements, the limit by TCP's
# window, and SimGrid's correction factors, which are from other machines.
_OPTIONS = {
    "network/model": "SMPI",
    "smpi/bw-factor": "0:1",
    "smpi/lat-factor": "0:1",
    "network/weight-S": "0",
    "network/crosstraffic": "0",
    "network/TCP-gamma": "1e30",
    # The sender of a smaller message continues before the message is received.
    "smpi/send-is-detached-thresh": "65536",
    # Small stacks, because there are thousands of processes that do little.
    "contexts/stack-size": "64",
    "contexts/guard-size": "0",
    "smpi/simulate-computation": "yes",
}


def find_smpirun() -> str:
    """Return the path of SimGrid's smpirun; raise BenchError if it is missing."""
    found = shutil.which("smpirun")
    if found is None:
        raise BenchError(
            "expected SimGrid's smpirun on the PATH for a prediction, found none; "
            "install SimGrid, on Debian and Ubuntu by apt-get install libsimgrid-dev"
        )
    return found


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of simulating traces."""

    # The time that the simulated nodes take.
    seconds: float
    # Real time and memory that the simulation needed.
    wall_seconds: float
    most_bytes: int


class Simulator:
    """Simulates traces on a network that has a given number of nodes."""

    def __init__(
        self, network: Network, num_nodes: int, options: Mapping[str, str]
    ) -> None:
        self._smpirun = find_smpirun()
        slower = network.in_world(_SLOWER)
        self._world: Platform = NETWORKS[network.kind](slower, num_nodes)
        self.words = self._world.words
        self._options = {**_OPTIONS, **options}
        if self._world.receive_seconds:
            self._options["smpi/or"] = f"0:{self._world.receive_seconds!r}:0"

    def replay(
        self, traces: Sequence[Sequence[str]], limit_seconds: float = 3600.0
    ) -> Replay:
        """Simulate one trace for each node; return the time until all nodes end."""
        with tempfile.TemporaryDirectory(prefix="hpcstrat-predict-") as name:
            folder = Path(name)
            (folder / "platform.xml").write_text(self._world.xml)
            (folder / "hosts").write_text("\n".join(self._world.hosts) + "\n")
            (folder / "trace").write_text("".join(_lines(traces)))
            (folder / "traces").write_text(f"{folder / 'trace'}\n")
            return self._run(folder, len(traces), limit_seconds)

    def _run(self, folder: Path, num_nodes: int, limit_seconds: float) -> Replay:
        command = [self._smpirun, "-no-privatize", "-np", str(num_nodes)]
        command += ["-platform", "platform.xml", "-hostfile", "hosts"]
        command += ["-replay", "traces"]
        command += [f"--cfg={key}:{value}" for key, value in self._options.items()]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=limit_seconds,
                env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
            )
        except subprocess.TimeoutExpired as error:
            raise BenchError(
                f"expected a replay of {num_nodes} nodes within {limit_seconds:g} "
                "s, found that it takes longer; use fewer nodes"
            ) from error
        found = _FOUND.search(done.stdout + done.stderr)
        if done.returncode or found is None:
            lines = (done.stderr or done.stdout).strip().splitlines()
            said = [line for line in lines if "CRITICAL" in line] or lines[-3:]
            raise BenchError(
                f"expected SimGrid to replay the trace of {num_nodes} nodes, found "
                f"exit status {done.returncode} and: {' '.join(said)}; check that "
                "there is enough memory, and that SimGrid is version 3.32 or newer"
            )
        most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        wall = time.monotonic() - start
        return Replay(float(found[1]) / _SLOWER, wall, most)


def _lines(traces: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield the first lines of all nodes, then the second lines, and so on."""
    # The lines are interleaved because SimGrid keeps the lines that it skips in memory.
    for row in zip_longest(*(["init", *trace, "finalize"] for trace in traces)):
        for node, line in enumerate(row):
            if line is not None:
                yield f"{node} {_slower(line)}\n"


def _slower(line: str) -> str:
    if line.startswith("sleep "):
        return f"sleep {float(line[6:]) * _SLOWER!r}"
    return line
