"""Pretend hosts of this machine, and MPI jobs over them, for tests and benchmarks."""

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
    """This machine cannot have pretend hosts; the text says why."""


class Hosts:
    """Pretend hosts node1, node2, ...; in use until ``close``, or the process's end.

    Parameters
    ----------
    num_hosts : int
        How many.
    rate : str, optional
        Limit of what each host sends, as ``tc`` spells it: ``"100mbit"``.
    delay_microseconds : int, optional
        How long a frame takes from host to host; needs gcc.

    Raises
    ------
    HostsUnavailable
        If this machine cannot have them: no root, no namespaces, no ``ip``.
    """

    def __init__(
        self, num_hosts: int = 2, rate: str = "", delay_microseconds: int = 0
    ) -> None:
        self.num_hosts = num_hosts
        # Where hosts_down.sh looks for hosts whose owner has died.
        self.folder = Path(f"/run/hpchosts-{os.getpid()}-{next(_numbers)}")
        delay = {"DELAY_US": str(delay_microseconds)} if delay_microseconds else {}
        # By the owner's number they are taken down even if this process is killed.
        up = self._up(["-o", str(os.getpid())], num_hosts, rate)
        finished = self._script(*up, **delay)
        if finished.returncode == NOT_POSSIBLE_HERE:
            raise HostsUnavailable(finished.stderr.strip())
        if finished.returncode:
            raise RuntimeError(f"{up[0]} failed: {finished.stderr}")

    def _up(self, owner: list[str], num_hosts: int, rate: str) -> list[str]:
        """Return the script that makes them, and its words."""
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
        """Take the hosts down, with all that runs on them."""
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
        """Take the hosts down."""
        self.close()

    def launcher(self, ranks: Sequence[int], *, round_robin: bool = False) -> Path:
        """Return an mpirun that places ranks on the hosts.

        Parameters
        ----------
        ranks : sequence of int
            How many ranks each host gets: the first ones on node1, and so on.
        round_robin : bool
            Deal the ranks to the hosts in turn instead; all get the same number.

        Returns
        -------
        path
            Takes the options of `hpcstrat.testing.launch_command`.
        """
        each = [1] * len(ranks) if round_robin else ranks
        places = ",".join(f"node{i}:{n}" for i, n in enumerate(each, 1))
        options = f"--host {places}"
        mpirun = find_launcher()
        if round_robin and "--oversubscribe" in testing.launch_command(1):
            options += " --map-by node"  # MPICH does so where the slots run out.
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
            Its arguments.
        round_robin : bool
            See `launcher`.
        **options : object
            Of `hpcstrat.testing.run`, such as ``timeout``, after which each rank's
            stacks are shown.

        Returns
        -------
        list
            What the function returned, in the order of ranks.
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
            Of `hpcstrat.testing.launch`, such as ``timeout``.

        Returns
        -------
        Finished
            Exit code and output.
        """
        launcher = self.launcher(ranks, round_robin=round_robin)
        return testing.launch(sum(ranks), command, launcher=launcher, **options)

    def processes(self) -> dict[int, str]:
        """Return the processes of all hosts, by number, with their command lines.

        Returns
        -------
        dict of int to str
            Without the one that keeps each host up.
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
