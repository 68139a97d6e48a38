"""The command ``hpcstrat watch``: its options, and the start of a watcher."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from hpcstrat.elastic.watching.allocation_end import job_name
from hpcstrat.elastic.watching.mesh import Identity
from hpcstrat.elastic.watching.run_launch import RunLaunch, choose_launcher
from hpcstrat.elastic.watching.run_state import WatchOptions
from hpcstrat.elastic.watching.watch_secret import SecretError, shared_secret
from hpcstrat.elastic.watching.watcher import Watcher

__all__ = ["watch"]

# Below the ports that Linux gives to clients.
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_MOST_NODES = 256
_WRONG_USE = 2


class WatchError(Exception):
    """Raised if a watcher cannot start; the text says why, and what to do."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcstrat watch",
        description="Watch the nodes of a job: start this command once on each node. "
        "After the loss of a node, a launcher or a rank, the watchers start the "
        "program again, on the nodes that are left.",
        epilog="See Continuing after the loss of a node in the guide.",
    )
    add = parser.add_argument
    add("--use", type=int, help="number of nodes that run ranks; default: all")
    add("--least", type=int, help="fewest nodes; default: as --use")
    add(
        "--ranks-per-node", type=int, default=None, help="default: tasks per node, or 1"
    )
    add(
        "--folder",
        type=Path,
        default=os.environ.get("RUN_FOLDER"),
        help="folder of the run, on a shared file system; default: RUN_FOLDER",
    )
    add("--nodes", help="names of the nodes, separated by commas; default: the job's")
    add("--job", default=None, help="name of this start; default: the scheduler's job")
    add("--port", type=int, default=None, help="default: chosen from the run's folder")
    add("--launcher", choices=("srun", "mpirun", "mpiexec"), help="default: found")
    add(
        "--launch-options",
        default="",
        help='options of the launcher, such as "--mpi=pmix --cpu-bind=cores"',
    )
    add(
        "--most-failures",
        type=int,
        default=3,
        help="starts in a row without progress, after which the watchers end",
    )
    add("--silent-seconds", type=float, default=3.0, help="a silent node is lost then")
    add("--gather-seconds", type=float, default=30.0, help="limit of the first meeting")
    add("--start-seconds", type=float, default=120.0, help="limit of a start")
    add("program", nargs=argparse.REMAINDER, help="-- program and its arguments")
    return parser


def _node_names(given: str | None) -> list[str]:
    """Return the names of the nodes of this job."""
    if given:
        return given.split(",")
    env = os.environ
    if text := env.get("SLURM_JOB_NODELIST", ""):
        from hpcstrat.cluster_resolver.node_list import expand_node_list

        return expand_node_list(text)
    if path := env.get("PBS_NODEFILE", ""):
        return list(dict.fromkeys(Path(path).read_text(encoding="utf-8").split()))
    if text := env.get("LSB_MCPU_HOSTS", ""):
        return text.split()[::2]
    raise WatchError(
        "expected the nodes of a job of Slurm, PBS or LSF, found none; use "
        "--nodes, also if this machine is the only one"
    )


def _own_name(nodes: Sequence[str]) -> str:
    names = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    for name in names:
        for node in nodes:
            if name and (node == name or node.split(".")[0] == name.split(".")[0]):
                return node
    raise WatchError(
        f"expected this node to be one of {', '.join(nodes)}, found {names[1]}; "
        "correct --nodes, or start the watchers on the nodes of the job"
    )


def _addresses(nodes: Sequence[str], port: int) -> dict[str, tuple[str, int]]:
    found = {}
    for node in nodes:
        try:
            # Names are looked up once: a name service may be slow later.
            told = socket.getaddrinfo(node, port, socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise WatchError(
                f"expected an address of node {node}, found {error}; correct --nodes"
            ) from error
        found[node] = (str(told[0][4][0]), port)
    return found


def _tasks_per_node() -> int:
    text = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get(
        "SLURM_TASKS_PER_NODE", "1"
    )
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 1


def _prepare(argv: Sequence[str]) -> Watcher:
    told = _parser().parse_args(argv)
    program = told.program[told.program[:1] == ["--"] :]
    if not program:
        raise WatchError("expected a program, found none; write it after --")
    if told.folder is None:
        raise WatchError("expected the folder of the run, found none; use --folder")
    nodes = _node_names(told.nodes)
    node = _own_name(nodes)
    use = len(nodes) if told.use is None else told.use
    least = use if told.least is None else told.least
    if not 1 <= least <= use <= len(nodes) or len(nodes) > _MOST_NODES:
        raise WatchError(
            f"expected 1 <= --least <= --use <= number of nodes <= {_MOST_NODES}, "
            f"found --least {least}, --use {use} and {len(nodes)} nodes; change them"
        )
    job = told.job or job_name()
    if not job:
        raise WatchError(
            "expected a job of a scheduler, found none; use --job with a name that is "
            "new for each start, and the same on all nodes"
        )
    each = told.ranks_per_node or _tasks_per_node()
    options = tuple(shlex.split(told.launch_options))
    launcher = told.launcher or choose_launcher()
    launch = RunLaunch(launcher, options, use, each * use, tuple(program))
    if shutil.which(launcher) is None:
        raise WatchError(
            f"expected the launcher {launcher}, found none; put it into the PATH"
        )
    run_folder = told.folder.resolve()
    folder = run_folder / "watch"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise WatchError(
            f"expected a folder {folder} that only you can write, found mode "
            f"{about.st_mode & 0o777:o} of user {about.st_uid}; use another --folder"
        )
    identity = Identity(shared_secret(folder), job, node)
    number = zlib.crc32(f"{folder} {job}".encode())
    port = told.port or _FIRST_PORT + number % _NUM_PORTS
    return Watcher(
        WatchOptions(
            folder=folder,
            marker=run_folder / "done",
            launch=launch,
            least=least,
            most_failures=told.most_failures,
            gather_seconds=told.gather_seconds,
            silent_seconds=told.silent_seconds,
            start_seconds=told.start_seconds,
        ),
        identity,
        _addresses(nodes, port),
    )


def watch(argv: Sequence[str]) -> int:
    """Run the command, and return its exit status."""
    try:
        return _prepare(argv).run()
    except (WatchError, SecretError, OSError) as error:
        sys.stderr.write(f"hpcstrat watch: {error}\n")
        return _WRONG_USE
