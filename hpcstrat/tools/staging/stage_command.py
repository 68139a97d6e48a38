"""The command ``hpcstrat stage``."""

from __future__ import annotations

import os
import shlex
import time
from typing import Any

import click

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.settings import Settings
from hpcstrat.errors import HpcstratError
from hpcstrat.strategies import MultiWorkerMirroredStrategy
from hpcstrat.strategies.connection import subset
from hpcstrat.tools.staging.broadcasting import Staged, copy_to_nodes, is_archive

__all__ = ["stage"]

# Ranks that only wait for the others of their node must not be reported as late.
_QUIET = Settings(summary="off", timeline="", watchdog=False)


@click.command()
@click.argument("source", type=click.Path())
@click.option(
    "--to",
    type=click.Path(),
    help="Folder of the copy on each node; default: /dev/shm/hpcstrat-USER/NAME, in "
    "memory.",
)
@click.option(
    "--replace", is_flag=True, help="Replace a copy of another state of the source."
)
def stage(source: str, to: str | None, replace: bool) -> None:
    """Copy an environment to the memory or disk of every node.

    \b
        srun --ntasks-per-node=1 hpcstrat stage /lustre/me/env

    SOURCE is a folder, such as a virtual environment, or an archive (.tar, .tar.gz,
    .tar.zst). One rank reads it once, and sends it to one rank of each node. A copy
    that a node has already is compared with its digest, and used again. Scripts and
    links of the environment get the paths of the copy.
    """
    source = os.path.abspath(source)
    place = os.path.abspath(to) if to else _default_place(source)
    try:
        with MultiWorkerMirroredStrategy(on_error="raise", settings=_QUIET) as strategy:
            is_first = strategy.replica_id == 0
            try:
                began = time.perf_counter()
                staged = _stage(strategy, source, place, replace)
                passed = time.perf_counter() - began
            except (HpcstratError, OSError, ValueError) as error:
                if is_first:
                    click.echo(f"hpcstrat stage: {error}", err=True)
                # Launchers may end the job when the first rank fails: print before.
                strategy.collectives.moves.barrier("end of hpcstrat stage")
                raise SystemExit(2) from error
            if is_first and staged is not None:
                _show(staged, source, place, passed)
    except HpcstratError as error:
        if launch_from_environment().rank == 0:
            click.echo(f"hpcstrat stage: {error}", err=True)
        raise SystemExit(2) from error


def _default_place(source: str) -> str:
    name = os.path.basename(source)
    if is_archive(source):
        name = name.partition(".tar")[0].removesuffix(".tgz")
    return f"/dev/shm/hpcstrat-{os.getuid()}/{name}"


def _stage(strategy: Any, source: str, place: str, replaces: bool) -> Staged | None:
    """Copy the environment; return the result on the first rank of each node.

    Collective over all ranks of the job. All ranks raise the error of any rank.
    """
    collectives = strategy.collectives
    topology = strategy.topology
    leads = topology.worker_comm.rank == 0
    leaders = collectives.all_gather_object(leads, "ranks that write")
    with collectives.section("comparison of the folders"):
        _require_apart(source, place)
    with collectives.section("hpcstrat stage"):
        if not leads:
            return None
        comm = subset([rank for rank, one in enumerate(leaders) if one])
        with MultiWorkerMirroredStrategy(
            comm=comm, on_error="raise", settings=_QUIET
        ) as writers:
            return copy_to_nodes(writers.collectives, source, place, replaces=replaces)


def _require_apart(source: str, place: str) -> None:
    one, other = (os.path.realpath(path) + "/" for path in (source, place))
    if one.startswith(other) or other.startswith(one):
        raise ValueError(
            f"expected a folder outside of {source}, found {place}; pass another "
            "folder by --to"
        )


def _show(staged: Staged, source: str, place: str, seconds: float) -> None:
    """Print what was copied, what it saved, and how to use the copy."""
    files = f"{staged.num_files:,} files, {staged.num_bytes / 1e6:,.1f} MB"
    nodes = f"{staged.num_nodes} node{'s' if staged.num_nodes > 1 else ''}"
    click.echo(f"{place} on {nodes} has {source} ({files})")
    if not staged.num_new:
        click.echo(
            f"all nodes had this copy; compared in {seconds:.1f} s, read 0 bytes"
        )
    else:
        written = staged.num_new * staged.num_bytes
        click.echo(
            f"read {staged.read_bytes / 1e6:,.1f} MB once, wrote {written / 1e6:,.1f} "
            f"MB on {staged.num_new} of them, in {seconds:.1f} s"
        )
    if staged.num_new and staged.num_nodes > 1:
        saved = staged.num_nodes * staged.num_bytes - staged.read_bytes
        click.echo(
            f"saved: if each node reads all files, that is {max(saved, 0) / 1e6:,.1f} "
            f"MB more, and {staged.num_files * (staged.num_nodes - 1):,} more files "
            "to open, on the shared file system"
        )
    if os.path.exists(os.path.join(place, "bin")):
        folder = shlex.quote(os.path.join(place, "bin"))
        click.echo(f"use it in this job: export PATH={folder}:$PATH")
        click.echo(f"or: srun {folder}/python PROGRAM")
    else:
        click.echo(f"use it in this job: export PYTHONPATH={shlex.quote(place)}")
    for word in _outside(place):
        click.echo(word)


def _outside(place: str) -> list[str]:
    """Return a sentence if the environment's interpreter is in another folder."""
    python = os.path.realpath(os.path.join(place, "bin", "python"))
    if not os.path.exists(python) or python.startswith(("/usr/", place + "/")):
        return []
    return [
        f"its interpreter is not in the copy, but at {python}: if that is on a shared "
        "file system, stage that environment too, or one with its own interpreter"
    ]
