"""Restart of a benchmark in a job on pretend hosts of this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click

from hpcstrat import testing

__all__ = ["on_hosts"]


def on_hosts(
    num_hosts: int,
    ranks_per_host: int,
    rate: str,
    delay_us: int = 0,
    *,
    in_turn: bool = False,
) -> int:
    """Make pretend hosts, run this program there, and remove the hosts; needs root.

    Not collective. The argument ``--on-hosts COMMAND`` is appended to the program's
    arguments.

    Parameters
    ----------
    num_hosts, ranks_per_host : int
        Number of hosts, and number of ranks on each host.
    rate : str
        Limit of each host's send rate; empty for no limit.
    delay_us : int
        Added latency of a frame in microseconds.
    in_turn : bool
        Whether ranks are placed on the hosts in turn.

    Returns
    -------
    int
        Exit code of the job.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.cluster.hosts import Hosts, HostsUnavailable

    command = f"python {shlex.join(sys.argv)}"
    program = [sys.executable, *sys.argv, "--on-hosts", command]
    ranks = [ranks_per_host] * num_hosts
    try:
        with Hosts(num_hosts, rate, delay_us) as hosts:
            launcher = hosts.launcher(ranks, round_robin=in_turn)
            words = [*testing.launch_command(sum(ranks), launcher), *program]
            return subprocess.run(words, check=False).returncode
    except HostsUnavailable as error:
        raise click.ClickException(str(error)) from error
