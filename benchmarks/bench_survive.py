"""The effective time of runs that lose ranks, nodes and launchers, on pretend hosts.

Run it as root, with iproute2::

    python benchmarks/bench_survive.py --hosts 10 -- --losses 50 --json FILE

It makes hosts on this machine, and starts ``hpcstrat bench survive`` with the options
after ``--``. A host that is lost loses all processes of the run; the next job uses it
again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from hpcstrat.testing.launcher import clean_environment

# All hosts share this machine's cores, and Open MPI's component "han" is slow here.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_coll": "^han",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


@click.command()
@click.option("--hosts", default=8, show_default=True, help="Number of hosts.")
@click.argument("words", nargs=-1)
def main(hosts: int, words: tuple[str, ...]) -> None:
    """Run hpcstrat bench survive WORDS on pretend hosts; needs root."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.cluster.hosts import Hosts, HostsUnavailable

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    folder = Path(tempfile.mkdtemp(prefix="survive-")) / "runs"
    command = [sys.executable, "-m", "hpcstrat", "bench", "survive"]
    try:
        with Hosts(hosts) as made:
            names = ",".join(f"node{number + 1}" for number in range(hosts))
            command += ["--nodes", names, "--on-node", f"{made.folder}/hx {{node}}"]
            command += ["--folder", str(folder), *words]
            env = clean_environment({**SETTINGS, "PATH": path})
            # With another mapping, all ranks may be on the first host.
            env.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
            raise SystemExit(subprocess.run(command, check=False, env=env).returncode)
    except HostsUnavailable as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
