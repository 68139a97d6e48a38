"""The command ``hpcstrat info --start``: how long a job takes until its first step.

Each rank measures its phases. The slowest rank is the one that is last ready for MPI:
from then on, the ranks wait for each other.
"""

from __future__ import annotations

import importlib
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np

from hpcstrat._launchers import LAUNCHER_PROGRAMS
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.process_stat import PARENT, START, process_stat
from hpcstrat.errors import HpcstratError
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["show_start_times"]

_BATCH = 32


@dataclass(frozen=True, slots=True)
class StartTimes:
    """The times of one rank, in seconds since 1970, in the order of the phases."""

    host: str
    launcher: float
    process: float
    modules: float
    mpi: float
    plan: float
    data: float
    end: float


def started_at(pid: int | str, proc: str = "/proc") -> float:
    """Return when a process started, in seconds since 1970."""
    ticks = int(process_stat(pid, proc)[1][START])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def launcher_started_at(pid: int, proc: str = "/proc") -> float:
    """Return when the first launcher above a process started, or the process itself."""
    found = started_at(pid, proc)
    while pid > 1:
        try:
            name, fields = process_stat(pid, proc)
            if name in LAUNCHER_PROGRAMS:
                found = started_at(pid, proc)
        except OSError:
            break
        pid = int(fields[PARENT])
    return found


def show_start_times(began: float, modules: Sequence[str], files: str | None) -> None:
    """Measure the phases of this start, and print them on the first rank.

    Collective over all ranks of the job. ``began`` is the time at which the interpreter
    was ready.
    """
    from hpcstrat.data import Dataset
    from hpcstrat.strategies import MultiWorkerMirroredStrategy

    trouble: Exception | None = None
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        trouble = error
    imported = time.time()
    settings = Settings(summary="off", timeline="")
    try:
        with MultiWorkerMirroredStrategy(
            on_error="raise", settings=settings
        ) as strategy:
            is_first = strategy.replica_id == 0
            started = time.time()
            with strategy.collectives.section("imports"):
                if trouble is not None:
                    raise trouble
            strategy.reduce("sum", np.ones(1024, np.float32), axis=None)
            planned = time.time()
            if files is not None:
                dataset = Dataset.from_files(files).batch(_BATCH)
                next(iter(strategy.experimental_distribute_dataset(dataset)))
            own = StartTimes(
                host=platform.node(),
                launcher=launcher_started_at(os.getpid()),
                process=started_at("self"),
                modules=began,
                mpi=imported,
                plan=started,
                data=planned,
                end=time.time(),
            )
            ranks = strategy.collectives.all_gather_object(own, "times of the start")
        if is_first:
            _show(ranks, modules, files)
    except (HpcstratError, ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _show(
    ranks: Sequence[StartTimes], modules: Sequence[str], files: str | None
) -> None:
    launched = min(rank.launcher for rank in ranks)
    phases = [
        ("launcher", [rank.process - launched for rank in ranks]),
        ("interpreter", [rank.modules - rank.process for rank in ranks]),
        ("imports", [rank.mpi - rank.modules for rank in ranks]),
        ("MPI", [rank.plan - rank.mpi for rank in ranks]),
        ("first plan", [rank.data - rank.plan for rank in ranks]),
        ("data", [rank.end - rank.data for rank in ranks]),
        ("all", [rank.end - launched for rank in ranks]),
    ]
    slowest = max(range(len(ranks)), key=lambda number: ranks[number].mpi)
    console = new_console(of_job=len(ranks) > 1)
    table = new_table(
        "seconds",
        f"slowest: rank {slowest} on {ranks[slowest].host}",
        "median",
        "least",
    )
    for name, seconds in phases:
        chosen: list[Any] = [
            seconds[slowest],
            statistics.median(seconds),
            min(seconds),
        ]
        if name == "data" and files is None:
            chosen = ["no --data", "", ""]
        add_row(table, name, *(x if isinstance(x, str) else f"{x:.2f}" for x in chosen))
    console.print(table)
    console.print(
        f"ranks: {len(ranks)}, hosts: {len({rank.host for rank in ranks})}; imports: "
        f"hpcstrat{''.join(f', {name}' for name in modules)}; in the phase MPI, ranks "
        "wait for the slowest one"
    )
