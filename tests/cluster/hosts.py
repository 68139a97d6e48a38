"""Pretend hosts on this machine, and MPI jobs on them, for tests and benchmarks."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpcstrat import testing
from hpcstrat.testing.launcher import find_launcher

SCRIPTS = Path(__file__).parent
NOT_POSSIBLE_HERE = 77
_numbers = itertools.count()


class HostsUnavailable(Exception):
    """Error: this machine cannot have pretend hosts; the text has the reason."""


class Hosts:
    """Pretend hosts node1, node2, ..., until ``close`` or the end of the process.

    Parameters
    ----------
    num_hosts : int
        How many.
    rate : str, optional
        Limit of each host's send rate, in the syntax of ``tc``: ``"100mbit"``.
    delay_microseconds : int, optional
        Latency of a frame from host to host; needs gcc.

    Raises
    ------
    HostsUnavailable
        If this machine cannot have pretend hosts, without root, namespaces or ``ip``.
    """

    def __init__(
        self, num_hosts: int = 2, rate: str = "", delay_microseconds: int = 0
    ) -> None:
        self.num_hosts = num_hosts
        # hosts_down.sh looks in such folders for hosts whose owner has died.
        self.folder = Path(f"/run/hpchosts-{os.getpid()}-{next(_numbers)}")
        delay = {"DELAY_US": str(delay_microseconds)} if delay_microseconds else {}
        # With the owner's process id, the hosts are removed even if this process is
        # killed.
        up = self._up(["-o", str(os.getpid())], num_hosts, rate)
        finished = self._script(*up, **delay)
        if finished.returncode == NOT_POSSIBLE_HERE:
            raise HostsUnavailable(finished.stderr.strip())
        if finished.returncode:
            raise RuntimeError(f"{up[0]} failed: {finished.stderr}")

    def _up(self, owner: list[str], num_hosts: int, rate: str) -> list[str]:
        """Return the script that makes the hosts, and its arguments."""
        return ["hosts_up.sh", *owner, str(num_hosts), *filter(None, [rate])]

    def _script(
        self, name: str, *words: str, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPTS / name), *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "HPCHOSTS_RUN": str(self.folder), **env},
        )

    def close(self) -> None:
        """Remove the hosts, and end all their processes."""
        finished = self._script("hosts_down.sh")
        if finished.returncode:
            raise RuntimeError(f"hosts_down.sh failed: {finished.stderr}")

    def __enter__(self) -> Self:
        """Return the hosts."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the hosts."""
        self.close()

    def launcher(self, ranks: Sequence[int], *, round_robin: bool = False) -> Path:
        """Return an mpirun that places ranks on the hosts.

        Parameters
        ----------
        ranks : sequence of int
            Number of ranks on each host: the first ranks on node1, and so on.
        round_robin : bool
            Place the ranks on the hosts in turn instead; the numbers must be equal.

        Returns
        -------
        path
            An mpirun with the options of `hpcstrat.testing.launch_command`.
        """
        each = [1] * len(ranks) if round_robin else ranks
        places = ",".join(f"node{i}:{n}" for i, n in enumerate(each, 1))
        options = f"--host {places}"
        mpirun = find_launcher()
        if round_robin and "--oversubscribe" in testing.launch_command(1):
            options += " --map-by node"  # MPICH needs no option.
        path = self.folder / f"mpirun-{places}{'-round' * round_robin}"
        path.write_text(
            f"#!/bin/sh\nHPCHOSTS_MPIRUN='{mpirun}' "
            f'exec {self.folder}/mpirun {options} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def run(
        self,
        ranks: Sequence[int],
        fn: Callable[..., Any],
        *args: Any,
        round_robin: bool = False,
        **options: Any,
    ) -> list[Any]:
        """Call a function on ranks of the hosts: `hpcstrat.testing.run`.

        Parameters
        ----------
        ranks : sequence of int
            See `launcher`.
        fn : callable
            Called once on each rank.
        *args : object
            Arguments of the function.
        round_robin : bool
            See `launcher`.
        **options : object
            Options of `hpcstrat.testing.run`, such as ``timeout``, after which the
            stacks of all ranks are printed.

        Returns
        -------
        list
            Results of the function, in the order of ranks.
        """
        launcher = self.launcher(ranks, round_robin=round_robin)
        return testing.run(sum(ranks), fn, *args, launcher=launcher, **options)

    def launch(
        self,
        ranks: Sequence[int],
        command: Sequence[str | os.PathLike[str]],
        *,
        round_robin: bool = False,
        **options: Any,
    ) -> testing.Finished:
        """Run a program on ranks of the hosts: `hpcstrat.testing.launch`.

        Parameters
        ----------
        ranks : sequence of int
            See `launcher`.
        command : sequence of str
            Program and arguments.
        round_robin : bool
            See `launcher`.
        **options : object
            Options of `hpcstrat.testing.launch`, such as ``timeout``.

        Returns
        -------
        Finished
            Exit code and output.
        """
        launcher = self.launcher(ranks, round_robin=round_robin)
        return testing.launch(sum(ranks), command, launcher=launcher, **options)

    def act(self, node: str, action: str) -> None:
        """Act on a host: off, freeze, thaw, cut or join; see hosts_down.sh."""
        done = self._script("hosts_down.sh", node, action)
        if done.returncode:
            raise RuntimeError(f"hosts_down.sh failed: {done.stderr}")

    def switch_off(self, node: str) -> None:
        """Kill a host and all its processes."""
        self.act(node, "off")

    def processes(self) -> dict[int, str]:
        """Return process ids and command lines of the processes on all hosts.

        Returns
        -------
        dict of int to str
            Command lines by process id, without the process that keeps a host up.
        """
        found = {}
        for path in self.folder.glob("groups/node*/cgroup.procs"):
            first = int((self.folder / f"{path.parent.name}.pid").read_text())
            for pid in map(int, path.read_text().split()):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if pid != first:
                    found[pid] = words.replace(b"\0", b" ").decode(errors="replace")
        return found
