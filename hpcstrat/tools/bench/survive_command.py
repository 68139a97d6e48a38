"""The command ``hpcstrat bench survive``: the effective time of runs with losses."""

from __future__ import annotations

import math
import os
import random
import shlex
import statistics
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from hpcstrat.cluster_resolver.node_list import expand_node_list
from hpcstrat.tools.bench.prediction.effective_time import LossyRun, MeasuredTimes
from hpcstrat.tools.bench.prediction.inputs import SURVIVE_FORMAT
from hpcstrat.tools.bench.run_file import BenchError, write_json
from hpcstrat.tools.bench.survival_run import SurvivalRun, SurvivalSetup
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["survive_command"]

_STEP_OF_SLURM = (
    "srun --overlap --no-kill --mpi=none --nodes=1 --ntasks=1 --nodelist={node}"
)
_NONE, _WATCHED, _QUEUED = "without losses", "with watchers", "by requeue alone"


@click.command("survive", context_settings={"show_default": True})
@click.option("--nodes", help="Nodes, separated by commas; default: those of the job.")
@click.option(
    "--on-node",
    metavar="COMMAND",
    help="Beginning of a command that runs on {node}, on a node with this one's files "
    "and variables; default: srun in a job of Slurm.",
)
@click.option(
    "--use",
    type=click.IntRange(1),
    help="Nodes that run ranks; the others are spare. Default: half of the nodes.",
    show_default=False,
)
@click.option("--ranks-per-node", type=click.IntRange(1), default=1)
@click.option("--launch-options", default="", help="Options of mpirun.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default="survive",
    help="New folder on a shared file system, for the runs.",
)
@click.option("--losses", type=click.IntRange(1), default=50, help="Number of losses.")
@click.option(
    "--every",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    help="Mean time between losses, in seconds.",
)
@click.option(
    "--calm-seconds",
    type=click.FloatRange(min=1),
    default=60.0,
    help="Duration of the run without losses.",
)
@click.option(
    "--queue-seconds",
    type=click.FloatRange(min=0),
    help="Also measure a run without watchers, which waits for this time in the queue "
    "after each loss.",
)
@click.option(
    "--queued-losses", type=click.IntRange(1), default=5, help="Losses of that run."
)
@click.option(
    "--state-mib", type=click.FloatRange(0), default=16.0, help="Weights of a replica."
)
@click.option(
    "--step-ms", type=click.FloatRange(0), default=40.0, help="Sleep in a step."
)
@click.option(
    "--snapshot-steps",
    type=click.IntRange(1),
    default=25,
    help="Steps between snapshots in the memory of the nodes.",
)
@click.option(
    "--save-steps",
    type=click.IntRange(1),
    default=250,
    help="Steps between saves to the disk.",
)
@click.option("--seed", type=int, default=1, help="Seed of the random losses.")
@click.option(
    "--json", "output", type=click.Path(), help="Write all figures to this file."
)
def survive_command(folder: Path, output: str | None, **words: Any) -> None:
    """Lose ranks, nodes and launchers at random, and measure the useful steps.

    \b
        salloc --nodes=12 --no-kill hpcstrat bench survive --use 2

    Starts watchers on the nodes of this job, with a training of its own, and kills
    parts of it at random. The figures are beside those of the same training without
    losses, and of one that is queued again after each loss.
    """
    try:
        setup = _setup(words)
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise BenchError(
                f"expected a new folder {folder}, found {error.strerror}; use --folder"
            ) from error
        runs = _measure(setup, folder.resolve(), words)
        report = _report(runs, words | {"num_nodes": setup.use})
        if output is not None:
            try:
                write_json(report, output)
            except OSError as error:
                raise BenchError(
                    f"expected to write {output}, found {error.strerror}; choose "
                    "another file"
                ) from error
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    _show(report)
    raise SystemExit(int(report["wrong_restores"] > 0))


def _setup(words: dict[str, Any]) -> SurvivalSetup:
    listed, on_node = os.environ.get("SLURM_JOB_NODELIST", ""), words["on_node"]
    if words["nodes"]:
        nodes = tuple(words["nodes"].split(","))
    else:
        nodes = tuple(expand_node_list(listed)) if listed else ()
    if not nodes or not (on_node or listed):
        raise BenchError(
            "expected a job of Slurm, or nodes and a command that runs on one of them, "
            "found neither; use salloc, or --nodes and --on-node"
        )
    use = words["use"] or math.ceil(len(nodes) / 2)
    if use >= len(nodes):
        raise BenchError(
            f"expected a spare node, found that {use} of {len(nodes)} nodes run ranks; "
            "use more nodes, or a smaller --use"
        )
    training = {
        "state_bytes": int(words["state_mib"] * 2**20),
        "step_seconds": words["step_ms"] / 1e3,
        "snapshot_steps": words["snapshot_steps"],
        "save_steps": words["save_steps"],
    }
    return SurvivalSetup(
        nodes,
        use,
        words["ranks_per_node"],
        on_node or _STEP_OF_SLURM,
        words["launch_options"],
        training,
    )


def _measure(
    setup: SurvivalSetup, folder: Path, words: dict[str, Any]
) -> dict[str, SurvivalRun]:
    plans = [(_NONE, 0, words["calm_seconds"]), (_WATCHED, words["losses"], None)]
    if words["queue_seconds"] is not None:
        plans.append((_QUEUED, words["queued_losses"], None))
    runs = {}
    for number, (name, losses, seconds) in enumerate(plans):
        click.echo(f"a run {name}", err=True)
        is_queued = name == _QUEUED
        if is_queued:
            # Only the disk outlives a job.
            setup = SurvivalSetup(
                setup.nodes,
                setup.use,
                setup.ranks_per_node,
                setup.on_node,
                setup.launch_options,
                {**setup.training, "snapshot_steps": 0},
            )
        runs[name] = SurvivalRun(
            setup,
            folder / name.replace(" ", "-"),
            random.Random(words["seed"] + number),
            words["queue_seconds"] if is_queued else None,
        )
        runs[name].go(losses, seconds or words["every"])
    return runs


def _sums(seconds: list[float], count: int) -> list[float]:
    """Return the sums of each ``count`` numbers, the incomplete last sum left out."""
    ends = range(count, len(seconds) + 1, count)
    return [sum(seconds[end - count : end]) for end in ends] or [sum(seconds)]


def _report(runs: dict[str, SurvivalRun], words: dict[str, Any]) -> dict[str, Any]:
    calm = [line for line in runs[_NONE].records() if line[1] == "step"]
    steps, saving = [line[3] for line in calm], [line[4] for line in calm]
    report: dict[str, Any] = {
        **SURVIVE_FORMAT,
        "command": shlex.join(["hpcstrat", *sys.argv[1:]]),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_nodes": words["num_nodes"],
        "replicas_per_node": words["ranks_per_node"],
        "steps_per_save": words["snapshot_steps"],
        "step_seconds": steps,
        # What all calls of save_if_due between two snapshots take together.
        "save_seconds": _sums(saving, words["snapshot_steps"]),
        "start_seconds": [],
        "wrong_restores": sum(run.wrong_restores() for run in runs.values()),
        "runs": [],
    }
    for name, run in runs.items():
        starts, each = run.start_seconds(), words["snapshot_steps"]
        if name == _WATCHED:
            report["start_seconds"] = [seconds for _, seconds in starts]
        elif name == _QUEUED:
            each = words["save_steps"]
        model = LossyRun(
            MeasuredTimes.of(steps),
            MeasuredTimes.of(_sums(saving, each)),
            MeasuredTimes.of([seconds for _, seconds in starts] or [0.0]),
            run.seconds / len(run.losses) if run.losses else math.inf,
            each,
        )
        effective = run.steps * statistics.fmean(steps) / run.seconds
        predicted = model.effective_time(effective * run.seconds)
        by_kind = defaultdict(list)
        for kind, seconds in starts:
            by_kind[kind].append(seconds)
        report["runs"].append(
            {
                "name": name,
                "losses": len(run.losses),
                "seconds": run.seconds,
                "steps": run.steps,
                "effective_time": effective,
                "predicted": predicted.mean,
                "predicted_deviation": predicted.deviation,
                "start_seconds": dict(by_kind),
            }
        )
    return report


def _show(report: dict[str, Any]) -> None:
    console = new_console()
    table = new_table("run", "losses", "s", "steps/s", "effective time", "predicted")
    for run in report["runs"]:
        rate, share = run["steps"] / run["seconds"], f"{run['effective_time']:.3f}"
        told = f"{run['predicted']:.3f} +- {run['predicted_deviation']:.3f}"
        cells = run["name"], run["losses"], f"{run['seconds']:.1f}", f"{rate:.2f}"
        add_row(table, *cells, share, told)
    console.print(table)
    for run in report["runs"]:
        for kind, seconds in run["start_seconds"].items():
            console.print(
                f"{run['name']}, a {kind} lost: next step after "
                f"{statistics.median(seconds):.2f} s (median of {len(seconds)}, "
                f"{min(seconds):.2f} to {max(seconds):.2f})"
            )
    console.print(f"wrong restores: {report['wrong_restores']}")
