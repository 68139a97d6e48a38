"""The command ``hpcstrat doctor``: what a job finds here, and what would stop it."""

from __future__ import annotations

import contextlib
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from hpcstrat.cli.examination import (
    Findings,
    RankFacts,
    launch_words,
    look,
    rank_facts,
    remarks_on,
)
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.errors import HpcstratError
from hpcstrat.gpu import library
from hpcstrat.gpu.probe import probe
from hpcstrat.gpu.probe.outcome import OPERATIONS
from hpcstrat.gpu.probe.probe import ProbeReport
from hpcstrat.options import CommunicationOptions
from hpcstrat.settings import Settings
from hpcstrat.topology.starting import start_mpi
from hpcstrat.topology.survival import problem_with_survival
from hpcstrat.typing import Replicas

__all__ = ["doctor"]

_WIDTH = 80
_COLUMN = 20
# A longer table would hide the problems, which come last.
_MOST_RANKS = 32
_REDUCTION_SECONDS = 60.0
_ELEMENTS = 1024


@click.command()
@click.option("--fresh", is_flag=True, help="Try again what MPI can do with GPUs.")
@click.option(
    "--launcher",
    metavar="WORDS",
    help="What starts two ranks for that, such as 'srun -n2 --mpi=pmix'.",
)
def doctor(fresh: bool, launcher: str | None) -> None:
    """Say what a job would find here: versions, GPUs, cores, and what is wrong.

    Run it alone on a login or compute node, or under mpirun or srun as a job would be:
    then rank 0 prints what all ranks have found. Exit status 1 if something would stop
    a job.
    """
    launch = launch_from_environment()
    found, report = Findings(), None
    if launch.rank == 0:
        found = look()
        words = None if launcher is None else shlex.split(launcher)
        report = _probed(found, fresh, words)
    if launch.size > 1:
        ranks, reduction, failed = _together(found)
    else:
        reduction = ""
        ranks = [rank_facts(0, _gpus())]
        _conclude(found, ranks)
        failed = bool(found.problems)
    if launch.rank == 0:
        _print(found, report, ranks, reduction)
    # On all ranks alike: a launcher may show the status of any of them.
    raise SystemExit(int(failed))


def _has_gpu() -> bool:
    return library.is_installed() and not library.why_no_gpu()


def _gpus() -> list[library.Gpu]:
    """Return the GPUs of this process; what is wrong with them was said before."""
    with contextlib.suppress(Exception):
        return library.visible_gpus() if _has_gpu() else []
    return []


def _probed(
    found: Findings, fresh: bool, launcher: Sequence[str] | None
) -> ProbeReport | None:
    """Return what MPI can do with memory of GPUs; tried where that is not known."""
    version = found.library_version
    if not version or not _has_gpu():
        return None
    # The settings of the library's folder are left out of the key once it is loaded.
    from hpcstrat.gpu.probe.probe_program import library_version

    version = library_version()
    report = None if fresh else probe.known(version)
    if report is None:
        click.echo("trying what MPI can do with memory of GPUs ...", err=True)
        report = probe.probe(version, launcher=launcher)
        if trouble := probe.save(report):
            found.remarks.append(
                f"the trial of MPI could not be kept ({trouble}), and jobs will do "
                "without; set XDG_CACHE_HOME to a folder that can be written"
            )
    _compare_with_settings(found, report)
    return report


def _compare_with_settings(found: Findings, report: ProbeReport) -> None:
    """Notice a setting that the trial contradicts."""
    try:
        setting = Settings().resolved().mpi_reads_gpu
    except (TypeError, ValueError):
        # Told already.
        return
    ok, reason = report.answer(probe.ABILITIES["mpi_sendrecv"])
    if setting == "yes" and not ok:
        found.problems.append(
            "expected an MPI that takes memory of GPUs, as HPCSTRAT_MPI_READS_GPU=yes "
            f"says, found that it does not: {reason}; unset that variable"
        )
    elif setting == "no" and ok:
        found.remarks.append(
            "HPCSTRAT_MPI_READS_GPU=no, although MPI takes memory of GPUs here: unset "
            "it to use that"
        )


def _conclude(found: Findings, ranks: Sequence[RankFacts]) -> None:
    problems, remarks = remarks_on(ranks)
    found.problems += problems
    found.remarks += remarks


# Under a launcher.


def _together(found: Findings) -> tuple[list[RankFacts], str, bool]:
    """Return what all ranks say, how arrays on GPUs are reduced, and if it failed.

    Collective over all ranks of the job, where MPI connects them. Only rank 0 has the
    ranks' facts; failed is the same on all.
    """
    try:
        mpi = start_mpi()
    except HpcstratError as error:
        found.problems.append(str(error))
        return [], "", True
    world = mpi.Comm(mpi.COMM_WORLD)
    if library.is_installed():
        # Where others have a GPU, the strategy says what is wrong.
        with contextlib.suppress(HpcstratError):
            library.load()
    gpus: list[library.Gpu] = []
    reduction = ""
    if problem_with_survival(mpi):
        found.software.append(("death of a rank", "ends the job"))
    else:
        found.software.append(("death of a rank", "can be survived"))
    try:
        gpus, reduction = _try_strategy(world.size)
    except Exception as error:
        # Raised on all ranks: they agree in the making of a strategy, and in a sum.
        found.problems.append(f"{error}")
        gpus = _gpus()
    ranks = world.gather(rank_facts(world.rank, gpus), root=0)
    if ranks is not None:
        _conclude(found, ranks)
    failed = bool(world.bcast(bool(found.problems), root=0))
    return ranks or [], reduction, failed


def _try_strategy(size: int) -> tuple[list[library.Gpu], str]:
    """Make a strategy, and reduce an array on the GPUs, if there are any."""
    from hpcstrat.strategies import MultiWorkerMirroredStrategy

    # A reduction that hangs is a finding, too, and must not keep the job.
    options = CommunicationOptions(timeout_seconds=_REDUCTION_SECONDS)
    with MultiWorkerMirroredStrategy(
        communication_options=options, settings=Settings(summary="off", timeline="")
    ) as strategy:
        gpu = strategy.topology.gpu
        if gpu is None:
            return [], ""
        ones, trouble = None, ""
        try:
            ones = library.load().ones(_ELEMENTS, "float32")
        except Exception as error:
            # Kept until all have told theirs: what follows is collective.
            trouble = f"{error}"
        _agree_on_trouble(strategy, trouble)
        total = strategy.reduce("sum", ones, axis=None)
        try:
            # Also where a GPU tells of what has failed on it before.
            found = float(total.sum()) / _ELEMENTS
            trouble = "" if found == size else f"a sum of {found:g}"
        except Exception as error:
            trouble = f"{error}"
        _agree_on_trouble(strategy, trouble)
        channel: Any = strategy.collectives.channel
        group = channel.device_group
        return [gpu], "" if group is None else str(group.reason)


def _agree_on_trouble(strategy: Replicas, trouble: str) -> None:
    """Raise on all ranks what has gone wrong on some."""
    told = strategy.topology.replica_comm.allgather(trouble)
    found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
    if found:
        raise RuntimeError(
            f"expected the right sum of an array on all GPUs, found {found}; do not "
            "compute here before that is mended"
        )


# Printing.


def _print(
    found: Findings,
    report: ProbeReport | None,
    ranks: Sequence[RankFacts],
    reduction: str,
) -> None:
    """Print everything, problems last."""
    _section("software")
    for name, value in found.software:
        _row(name, value)
    _section("launch")
    _row("launcher", launch_words())
    if ranks:
        _print_ranks(ranks)
    if report is not None:
        _print_report(report)
    if reduction:
        _section("sums of arrays on GPUs")
        _row("by", reduction)
    for title, texts in (("remarks", found.remarks), ("problems", found.problems)):
        if texts:
            _section(title)
            for number, text in enumerate(texts, 1):
                _row(f"{number}.", text, 5)
    if not found.problems:
        _section("no problems found")


def _section(title: str) -> None:
    click.echo(f"\n{title}" if title != "software" else title)


def _row(name: str, value: str, column: int = _COLUMN) -> None:
    """Print a name and a value, in lines of 80 columns."""
    start = f"  {name}".ljust(column)
    if len(start) > column or not start.endswith(" "):
        start += " "
    # Words stay whole: paths and commands are to be copied.
    lines = textwrap.wrap(
        " ".join(value.split()),
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * column,
        break_on_hyphens=False,
        break_long_words=False,
    )
    click.echo("\n".join(lines or [start.rstrip()]))


def _print_ranks(ranks: Sequence[RankFacts]) -> None:
    for host in dict.fromkeys(facts.host for facts in ranks):
        here = [facts for facts in ranks if facts.host == host]
        cores = set().union(*(facts.cores for facts in here))
        shm = min(facts.shm_bytes for facts in here)
        words = (
            f"{len(here)} rank{'s' * (len(here) > 1)}, {len(cores)} cores, /dev/shm "
        )
        _row(host, words + (_size(shm) if shm else "missing"))
    _section("ranks")
    for facts in ranks[:_MOST_RANKS]:
        threads = facts.threads or "unset"
        _row(
            f"rank {facts.rank}",
            f"{facts.host}, {len(facts.cores)} cores, OMP_NUM_THREADS {threads}",
        )
        for bus_id, name, memory, free in facts.gpus:
            left = "does not answer" if free < 0 else f"{_size(free)} free"
            _row("", f"GPU {bus_id} {name}, {_size(memory)}, {left}")
    if len(ranks) > _MOST_RANKS:
        _row("", f"and {len(ranks) - _MOST_RANKS} more ranks")


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f} GiB"
    return f"{nbytes >> 20} MiB"


def _print_report(report: ProbeReport) -> None:
    _section("memory of GPUs in calls of MPI")
    if not report.answers:
        _row("not tried", report.how)
        if report.output:
            # The end of it says why.
            _row("it said", report.output[-400:])
        return
    for name in OPERATIONS:
        answer = report.answers.get(name)
        if answer is not None:
            _row(name, f"{'yes' if answer.ok else 'no'}, {answer.reason}")
    _row("tried", f"{report.date}, with {report.how}")
    _row("kept in", str(probe.cache_path(report.kind)))
