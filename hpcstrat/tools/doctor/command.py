"""The command ``hpcstrat doctor``: every rank examines, and rank 0 reports."""

from __future__ import annotations

import contextlib
import platform
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.gpu import library
from hpcstrat.engine.gpu.probe import probe
from hpcstrat.engine.gpu.probe.probe import ProbeReport
from hpcstrat.engine.options import CommunicationOptions
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.starting import abandon_mpi, start_mpi
from hpcstrat.engine.topology.survival import problem_with_survival
from hpcstrat.engine.typing import Replicas
from hpcstrat.errors import HpcstratError
from hpcstrat.tools.doctor.examination import RankFacts, compare, look, rank_facts
from hpcstrat.tools.doctor.findings import Findings, names, rank_words
from hpcstrat.tools.doctor.judging import judge, summarize
from hpcstrat.tools.doctor.rank_measures import (
    LIMIT_SECONDS,
    RankMeasures,
    gather,
    measure,
    measure_alone,
    share,
)
from hpcstrat.tools.doctor.showing import DoctorReport

__all__ = ["doctor"]

_REDUCTION_SECONDS = 60.0
_ELEMENTS = 1024
_HOSTS, _FACTS = 31, 32


@click.command()
@click.option(
    "--fresh",
    is_flag=True,
    help="Test again what MPI can do with GPU memory, even if a result is kept.",
)
@click.option(
    "--launcher",
    metavar="WORDS",
    help="Command that starts two ranks for the test of MPI with GPU memory, such as "
    "'srun -n2 --mpi=pmix'.",
)
@click.option(
    "--measure",
    "measures",
    is_flag=True,
    help="Also measure links, memory, the clocks, and the disk of --folder.",
)
@click.option(
    "--folder",
    default=".",
    show_default=True,
    type=click.Path(),
    help="Folder in which the job will save checkpoints.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    fresh: bool, launcher: str | None, measures: bool, folder: str, as_json: bool
) -> None:
    """Show what a job would find on these hosts: versions, GPUs, cores, and problems.

    Run the command alone on a login or compute node, or under mpirun or srun with the
    options of your job: then rank 0 prints what all ranks have found. The exit status
    is 1 if the report lists problems, and 0 if it lists only remarks.
    """
    launch = launch_from_environment()
    report = DoctorReport(Findings())
    # Examine the libraries before MPI starts, because this starts child processes,
    # which must not become ranks of the job.
    if launch.rank == 0:
        report.found = look()
        words = None if launcher is None else shlex.split(launcher)
        report.probe = _probed(report.found, fresh, words)
    path = folder if measures else None
    show = report.show_json if as_json else report.show
    if launch.size > 1:
        raise SystemExit(int(_together(report, path, show)))
    own = None if path is None else measure_alone(path)
    _conclude(report, path, [(rank_facts(0, _gpus()), own)])
    show()
    raise SystemExit(int(bool(report.found.problems)))


def _has_gpu() -> bool:
    return library.is_installed() and not library.why_no_gpu()


def _gpus() -> list[library.Gpu]:
    """Return the GPUs of this process; ignore errors, which `look` has reported."""
    with contextlib.suppress(Exception):
        return library.visible_gpus() if _has_gpu() else []
    return []


def _probed(
    found: Findings, fresh: bool, launcher: Sequence[str] | None
) -> ProbeReport | None:
    """Return a report on what MPI can do with GPU memory; run the probe if needed."""
    version = found.library_version
    if not version or not _has_gpu():
        return None
    # Load the MPI library before `known`: the key of a cached report omits the folder
    # of the loaded MPI library from LD_LIBRARY_PATH.
    from hpcstrat.engine.gpu.probe.probe_program import library_version

    version = library_version()
    report = None if fresh else probe.known(version)
    if report is None:
        click.echo("testing what MPI can do with GPU memory ...", err=True)
        report = probe.probe(version, launcher=launcher)
        if trouble := probe.save(report):
            found.remark(
                "trial",
                f"the result of the test of MPI could not be stored ({trouble}), so "
                "jobs will not use it; set XDG_CACHE_HOME to a folder that can be "
                "written",
            )
    _compare_with_settings(found, report)
    return report


def _compare_with_settings(found: Findings, report: ProbeReport) -> None:
    """Report the setting mpi_reads_gpu if the probe's result contradicts it."""
    try:
        setting = Settings().resolved().mpi_reads_gpu
    except (TypeError, ValueError):
        # `look` has reported this error.
        return
    ok, reason = report.answer(probe.ABILITIES["mpi_sendrecv"])
    if setting == "yes" and not ok:
        found.problem(
            "mpi-reads-gpu",
            "expected an MPI that can read GPU memory, because of "
            f"HPCSTRAT_MPI_READS_GPU=yes, found that it cannot: {reason}; unset that "
            "variable",
        )
    elif setting == "no" and ok:
        found.remark(
            "mpi-reads-gpu",
            "HPCSTRAT_MPI_READS_GPU=no, although MPI can read GPU memory here: unset "
            "it to use this",
        )


def _conclude(
    report: DoctorReport,
    path: str | None,
    answers: Sequence[tuple[RankFacts, RankMeasures | None]],
) -> None:
    """Record the facts of all ranks that answered, and the problems in these facts."""
    report.ranks = [facts for facts, _ in answers]
    # ``answers`` lacks silent ranks, which `_tell_silent` reports.
    report.found.add(compare(report.ranks))
    measures = [told for _, told in answers if told is not None]
    if path is not None:
        report.measured = summarize(path, report.ranks, measures)
        report.found.add(judge(report.measured))


# Functions for several ranks, under a launcher.


def _together(report: DoctorReport, path: str | None, show: Callable[[], None]) -> bool:
    """Examine all ranks, print the report, and return whether this rank must fail.

    Collective over all ranks of the job, if MPI connects them. Only rank 0 has the
    report. The other ranks fail only if rank 0 does not answer: if they fail earlier, a
    launcher may end the job before rank 0 has printed the report.
    """
    start = time.perf_counter()
    try:
        mpi = start_mpi()
    except HpcstratError as error:
        report.found.problem("launch", str(error))
        if launch_from_environment().rank:
            return False
        show()
        return True
    measures = RankMeasures(init_seconds=time.perf_counter() - start)
    world = mpi.Comm(mpi.COMM_WORLD)
    # Gather the names of hosts now, to report the host of a rank that is silent later.
    hosts = gather(world, platform.node(), LIMIT_SECONDS, _HOSTS)
    if library.is_installed():
        # Ignore errors: if other ranks have a GPU, the strategy reports the problem.
        with contextlib.suppress(HpcstratError):
            library.load()
    survives = "ends the job" if problem_with_survival(mpi) else "can be survived"
    report.found.software.append(("death of a rank", survives))
    gpus: list[library.Gpu] = []
    try:
        gpus, report.reduction = _try_strategy(world.size, path, measures)
    except Exception as error:
        # All ranks raise this error: ranks agree on errors of strategies and sums.
        report.found.problem("strategy", f"{error}")
        gpus = _gpus()
    own = rank_facts(world.rank, gpus), measures
    answers = gather(world, own, LIMIT_SECONDS, _FACTS)
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    if world.rank == 0:
        _conclude(report, path, [answer for answer in answers if answer is not None])
        if silent:
            _tell_silent(report.found, silent, hosts)
        show()
    # Twice the limit, because rank 0 may wait for a silent rank up to the limit.
    told = share(world, silent, 2 * LIMIT_SECONDS)
    if told is None or told:
        # Skip MPI_Finalize, which would wait for silent ranks; the launcher ends them.
        abandon_mpi()
    return told is None or bool(report.found.problems and world.rank == 0)


def _tell_silent(
    found: Findings, silent: Sequence[int], hosts: Sequence[str | None]
) -> None:
    where = tuple(dict.fromkeys(hosts[rank] or "an unknown host" for rank in silent))
    found.problem(
        "silent",
        f"expected all ranks to answer within {LIMIT_SECONDS:g} s, found that "
        f"{rank_words(silent)} on {names(where)} did not; see whether the host, or a "
        "file system that it uses, hangs, and leave it out (sbatch --exclude)",
        hosts=where,
        ranks=tuple(silent),
    )


def _try_strategy(
    size: int, path: str | None, measures: RankMeasures
) -> tuple[list[library.Gpu], str]:
    """Make a strategy, measure, and sum an array on the GPUs, if there are any."""
    from hpcstrat.strategies import MultiWorkerMirroredStrategy

    # Set a timeout, so that a sum that hangs is reported, and the command ends.
    options = CommunicationOptions(timeout_seconds=_REDUCTION_SECONDS)
    # Record no summary or timeline, even if environment variables request them.
    with MultiWorkerMirroredStrategy(
        communication_options=options, settings=Settings(summary="off", timeline="")
    ) as strategy:
        if path is not None:
            measure(strategy.topology, path, measures)
        gpu = strategy.topology.gpu
        if gpu is None:
            return [], ""
        ones, trouble = None, ""
        try:
            ones = library.load().ones(_ELEMENTS, "float32")
        except Exception as error:
            # Do not raise the error yet: the next call is collective, and the other
            # ranks would wait for this rank.
            trouble = f"{error}"
        _agree_on_trouble(strategy, trouble)
        total = strategy.reduce("sum", ones, axis=None)
        try:
            # Read the sum in the try block, because an error of an earlier GPU
            # operation may be raised only here.
            found = float(total.sum()) / _ELEMENTS
            trouble = "" if found == size else f"a sum of {found:g}"
        except Exception as error:
            trouble = f"{error}"
        _agree_on_trouble(strategy, trouble)
        channel: Any = strategy.collectives.channel
        group = channel.device_group
        return [gpu], "" if group is None else str(group.reason)


def _agree_on_trouble(strategy: Replicas, trouble: str) -> None:
    """Raise an error on all ranks if some ranks have one; the text names all errors."""
    told = strategy.topology.replica_comm.allgather(trouble)
    found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
    if found:
        raise RuntimeError(
            f"expected the right sum of an array on all GPUs, found {found}; do not "
            "run jobs here before this is repaired"
        )
