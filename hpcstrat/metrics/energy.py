"""The energy that the nodes of a job use, from the counters of the system.

Each counter is read by one rank of a node. On Crays the counter of the whole node is
read; elsewhere those of the processors and their memory (RAPL), and of the GPUs (NVML);
where there is neither, the counter that Slurm has of the node.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hpcstrat.metrics.log import Log
from hpcstrat.strategies import Strategy, get_strategy

__all__ = ["EnergyMeter"]

# The counter of a processor starts again at 0 after a quarter of an hour at 300 W.
_SECONDS_BETWEEN_READINGS = 60.0
_COMMAND_SECONDS = 10.0


class _EnergyCounter:
    """A counter of joules; ``most`` is the value after which it starts again at 0."""

    def __init__(self, kind: str, read: Callable[[], float], most: float = 0) -> None:
        self.kind, self._read, self._most = kind, read, most
        self._last = read()
        self.joules = 0.0

    def update(self) -> None:
        """Add the energy since the last reading."""
        found = self._read()
        used = found - self._last
        # A counter without a limit that falls was reset: nothing is known since then.
        self.joules += used if used >= 0 else max(used + self._most, 0.0)
        self._last = found


class NodeEnergy:
    """The energy of this node since this object was made; ``reasons`` if none is known.

    ``root`` is the folder in which ``sys`` is. Counters are also read once a minute, by
    a thread, because they start again at 0.
    """

    def __init__(self, root: str = "/") -> None:
        self.reasons: list[str] = []
        self.counters = list(self._cray(root))
        if not self.counters:
            self.counters = [*self._rapl(root), *self._nvml()]
        if not self.counters:
            self.counters = list(self._slurm())
        self._lock, self._ended = threading.Lock(), threading.Event()
        if self.counters:
            own = weakref.WeakMethod(self.joules)
            arguments = own, self._ended
            threading.Thread(target=_read_on, args=arguments, daemon=True).start()
            weakref.finalize(self, self._ended.set)

    def joules(self) -> dict[str, float]:
        """Return the joules since the begin, by kind of counter."""
        found: dict[str, float] = {}
        with self._lock:
            for counter in self.counters:
                counter.update()
                found[counter.kind] = found.get(counter.kind, 0.0) + counter.joules
        return found

    def _cray(self, root: str) -> Iterator[_EnergyCounter]:
        path = os.path.join(root, "sys/cray/pm_counters/energy")
        if os.path.exists(path):
            # The file has a number of joules, its unit, and a time.
            yield from self._made(
                "Cray", lambda: float(_content(path).split()[0]), path
            )

    def _rapl(self, root: str) -> Iterator[_EnergyCounter]:
        folder = os.path.join(root, "sys/class/powercap")
        zones = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        # A zone such as core, inside of a package, is a part of the package.
        zones = [zone for zone in zones if re.fullmatch(r"intel-rapl(:\d+)+", zone)]
        for zone in zones:
            name = _content(os.path.join(folder, zone, "name")).strip()
            if name.startswith("package") or name == "dram":
                path = os.path.join(folder, zone, "energy_uj")
                limit = os.path.join(folder, zone, "max_energy_range_uj")
                most = float(_content(limit)) / 1e6
                kind = "memory" if name == "dram" else "processors"
                yield from self._made(kind, partial(_microjoules, path), path, most)
        if not zones:
            self.reasons.append(f"no counters of RAPL in {folder}")

    def _nvml(self) -> Iterator[_EnergyCounter]:
        try:
            import pynvml
        except ImportError:
            self.reasons.append("no NVML: pip install nvidia-ml-py, if there are GPUs")
            return
        try:
            pynvml.nvmlInit()
            for number in range(pynvml.nvmlDeviceGetCount()):
                device = pynvml.nvmlDeviceGetHandleByIndex(number)
                yield _EnergyCounter("GPUs", partial(_of_gpu, device))
        except pynvml.NVMLError as error:
            self.reasons.append(f"no counters of NVML: {error}")

    def _slurm(self) -> Iterator[_EnergyCounter]:
        if "SLURM_JOB_ID" not in os.environ or shutil.which("scontrol") is None:
            return
        node = os.environ.get("SLURMD_NODENAME", platform.node().split(".")[0])
        command = ["scontrol", "show", "node", node]

        def read() -> float:
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
            )
            found = re.search(r"ConsumedJoules=(\d+)", done.stdout)
            if found is None:
                raise ValueError("Slurm has no AcctGatherEnergyType")
            return float(found.group(1))

        yield from self._made("Slurm", read, " ".join(command))

    def _made(
        self, kind: str, read: Callable[[], float], source: str, most: float = 0
    ) -> Iterator[_EnergyCounter]:
        """Yield a counter; note the reason if it cannot be read."""
        try:
            yield _EnergyCounter(kind, read, most)
        except PermissionError:
            self.reasons.append(
                f"only root may read {source}, as since 2020 by default"
            )
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            self.reasons.append(f"{source} cannot be read: {error}")


def _content(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _microjoules(path: str) -> float:
    return float(_content(path)) / 1e6


def _of_gpu(device: Any) -> float:
    import pynvml

    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device)) / 1e3


def _read_on(joules: weakref.WeakMethod[Any], ended: threading.Event) -> None:
    while not ended.wait(_SECONDS_BETWEEN_READINGS):
        read = joules()
        if read is None:
            return
        read()
        del read


class EnergyMeter:
    """Measures the energy of all nodes of a job since the meter was made.

    Collective over ``strategy``'s replicas. It counts each node once, with everything
    that runs on it, also other jobs. It sees processors, memory and GPUs, or on Crays
    the whole node, where the system lets users read these counters.

    Parameters
    ----------
    strategy : Strategy, optional
        Default: the current strategy.
    root : str
        Folder with the folder ``sys`` of the system, for tests.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> meter = hs.metrics.EnergyMeter(hs.MirroredStrategy())
    >>> energy = meter.result()
    >>> energy["joules"] is None or energy["joules"] >= 0
    True
    """

    def __init__(self, strategy: Strategy | None = None, *, root: str = "/") -> None:
        self._strategy = strategy or get_strategy()
        ranks = self._strategy.all_ranks.collectives
        hosts = ranks.all_gather_object(platform.node(), "hosts of an energy meter")
        is_first = hosts.index(platform.node()) == ranks.rank
        self._node = NodeEnergy(root) if is_first else None
        self._began = time.perf_counter()

    def __repr__(self) -> str:
        return f"EnergyMeter({self._strategy!r})"

    def result(self) -> dict[str, Any]:
        """Return the energy since the meter was made, of all nodes.

        Collective over the strategy's replicas.

        Returns
        -------
        dict
            The same on all replicas: ``joules``, a float, or None if a node has no
            counter that can be read; ``parts``, the joules by kind of counter;
            ``seconds``, the time of this rank 0; ``nodes``; and ``text``, a line with
            these numbers, or with the reason why there is no figure.
        """
        seconds = time.perf_counter() - self._began
        own = None
        if self._node is not None:
            own = platform.node(), self._node.joules(), self._node.reasons, seconds
        told = self._strategy.all_ranks.collectives.all_gather_object(own, "energy")
        nodes = [node for node in told if node is not None]
        parts: dict[str, float] = {}
        for _, joules, _, _ in nodes:
            for kind, value in joules.items():
                parts[kind] = parts.get(kind, 0.0) + value
        without = [node for node in nodes if not node[1]]
        found: dict[str, Any] = {
            "joules": None if without else sum(parts.values()),
            "parts": parts,
            "seconds": nodes[0][3],
            "nodes": len(nodes),
        }
        if without:
            host, _, reasons, _ = without[0]
            found["text"] = (
                f"energy: no figure, because on {host}: {'; '.join(reasons)}"
            )
        else:
            shown = ", ".join(f"{kind} {value:.4g} J" for kind, value in parts.items())
            mean = found["joules"] / max(found["seconds"], 1e-9)
            found["text"] = (
                f"energy: {found['joules'] / 3.6e6:.4g} kWh on {len(nodes)} nodes "
                f"({shown}), {mean:.4g} W"
            )
        return found

    def log(self, log: Log, step: int) -> None:
        """Write the joules so far into a log, or, at step 0, why there are none.

        Collective over the strategy's replicas.

        Parameters
        ----------
        log : Log
            Gets the scalar ``energy_joules``, or the text ``energy``.
        step : int
            The step of the training.
        """
        found = self.result()
        if found["joules"] is not None:
            log.scalars(step, energy_joules=found["joules"])
        elif step == 0:
            log.text(step, "energy", found["text"])
