"""The command ``hpcstrat bench survive``: the effective time of runs with losses."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import click

from hpcstrat.cluster_resolver.node_list import expand_node_list
from hpcstrat.tools.bench.prediction.effective_time import LossyRun, MeasuredTimes
from hpcstrat.tools.bench.prediction.inputs import SURVIVE_FORMAT
from hpcstrat.tools.bench.run_file import BenchError, write_json
from hpcstrat.tools.bench.survival_run import SurvivalRun
from hpcstrat.tools.terminal import add_row, new_console, new_table

__all__ = ["survive_command"]

_STEP_OF_SLURM = (
    "srun --overlap --no-kill --mpi=none --nodes=1 --ntasks=1 --nodelist={node}"
)
_NONE, _WATCHED, _QUEUED = "without losses", "with watchers", "by requeue alone"
# Each of these losses takes the time in the queue.
_QUEUED_LOSSES = 5
_SOME, _MORE = click.IntRange(1), click.FloatRange(0, min_open=True)


@click.command("survive", context_settings={"show_default": True})
@click.option("--nodes", help="Nodes, separated by commas; default: those of the job.")
@click.option(
    "--on-node",
    metavar="COMMAND",
    help="Beginning of a command that runs on {node}; default: srun in a job of Slurm.",
)
@click.option("--use", type=_SOME, default=1, help="Nodes of ranks; others are spare.")
@click.option("--ranks-per-node", type=_SOME, default=1)
@click.option("--folder", default="survive", help="New folder, which all nodes share.")
@click.option("--losses", type=_SOME, default=50, help="Number of losses.")
@click.option("--every", type=_MORE, default=20.0, help="Mean seconds between losses.")
@click.option(
    "--calm-seconds", type=_MORE, default=60.0, help="Time of the run without losses."
)
@click.option(
    "--queue-seconds",
    type=click.FloatRange(0),
    help="Also measure a run without watchers, queued so long after each loss.",
)
@click.option("--state-mib", type=_MORE, default=16.0, help="Weights of a replica.")
@click.option("--step-ms", type=_MORE, default=40.0, help="Sleep in a step.")
@click.option(
    "--snapshot-steps",
    type=_SOME,
    default=25,
    help="Steps between snapshots; the disk gets each tenth.",
)
@click.option("--seed", default=1, help="Seed of the random losses.")
@click.option("--json", "output", help="Write all figures to this file.")
def survive_command(folder: str, output: str | None, **told: Any) -> None:
    """Lose ranks, nodes and launchers at random, and measure the useful steps.

    \b
        salloc --nodes=12 --no-kill hpcstrat bench survive --use 2

    Starts watchers on the nodes of this job, with a training of its own, and kills
    parts of it at random. The figures are beside those of the same training without
    losses, and of one that is queued again after each loss.
    """
    try:
        told |= _nodes(told) | {"save_steps": 10 * told["snapshot_steps"]}
        Path(folder).mkdir(parents=True)
        report = _report(_measure(told, Path(folder).resolve()), told)
        if output is not None:
            write_json(report, output)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"expected a new folder, and a file for the figures, found "
            f"{error.filename}: {error.strerror}; use --folder or --json"
        ) from error
    _show(report)
    raise SystemExit(int(report["wrong_restores"] > 0))


def _nodes(told: dict[str, Any]) -> dict[str, Any]:
    """Return the nodes, and the command that runs on one of them."""
    listed = os.environ.get("SLURM_JOB_NODELIST", "")
    nodes = told["nodes"].split(",") if told["nodes"] else expand_node_list(listed)
    on_node = told["on_node"] or (_STEP_OF_SLURM if listed else "")
    if not nodes or not on_node:
        raise BenchError(
            "expected a job of Slurm, or nodes and a command that runs on one of them, "
            "found neither; use salloc, or --nodes and --on-node"
        )
    if told["use"] >= len(nodes):
        raise BenchError(
            f"expected a spare node, found that {told['use']} of {len(nodes)} nodes "
            "run ranks; use more nodes, or a smaller --use"
        )
    return {"nodes": nodes, "on_node": on_node}


def _measure(told: dict[str, Any], folder: Path) -> dict[str, SurvivalRun]:
    plans = [
        (_NONE, 0, told["calm_seconds"]),
        (_WATCHED, told["losses"], told["every"]),
    ]
    if told["queue_seconds"] is not None:
        plans.append((_QUEUED, min(_QUEUED_LOSSES, told["losses"]), told["every"]))
    runs = {}
    for number, (name, losses, seconds) in enumerate(plans):
        click.echo(f"a run {name}", err=True)
        runs[name] = SurvivalRun(
            told,
            folder / name.replace(" ", "-"),
            told["seed"] + number,
            told["queue_seconds"] if name == _QUEUED else None,
        )
        runs[name].go(losses, seconds)
    return runs


def _sums(seconds: list[float], count: int) -> list[float]:
    """Return the sums of each ``count`` numbers, the incomplete last sum left out."""
    ends = range(count, len(seconds) + 1, count)
    return [sum(seconds[end - count : end]) for end in ends] or [sum(seconds)]


def _report(runs: dict[str, SurvivalRun], told: dict[str, Any]) -> dict[str, Any]:
    calm = runs[_NONE].records("step")
    steps, saving = [line[3] for line in calm], [line[4] for line in calm]
    report: dict[str, Any] = {
        **SURVIVE_FORMAT,
        "command": shlex.join(["hpcstrat", *sys.argv[1:]]),
        "options": told,
        "num_nodes": told["use"],
        "replicas_per_node": told["ranks_per_node"],
        "step_seconds": steps,
        # All calls of save_if_due between two snapshots take this time together.
        "save_seconds": _sums(saving, told["snapshot_steps"]),
        "start_seconds": [seconds for _, seconds in runs[_WATCHED].start_seconds()],
        "wrong_restores": sum(run.wrong_restores() for run in runs.values()),
        "runs": [],
    }
    for name, run in runs.items():
        starts = run.start_seconds()
        each = told["save_steps" if name == _QUEUED else "snapshot_steps"]
        predicted = LossyRun(
            MeasuredTimes.of(steps),
            MeasuredTimes.of(_sums(saving, each)),
            MeasuredTimes.of([seconds for _, seconds in starts] or [0.0]),
            run.seconds / len(run.losses) if run.losses else math.inf,
            each,
        ).effective_time(run.steps * statistics.fmean(steps))
        report["runs"].append(
            {
                "name": name,
                "losses": len(run.losses),
                "seconds": run.seconds,
                "steps": run.steps,
                "effective_time": run.steps * statistics.fmean(steps) / run.seconds,
                "predicted": predicted.mean,
                "predicted_deviation": predicted.deviation,
                "starts": starts,
            }
        )
    return report


def _show(report: dict[str, Any]) -> None:
    console = new_console()
    table = new_table("run", "losses", "s", "steps/s", "effective time", "predicted")
    lines = [f"wrong restores: {report['wrong_restores']}"]
    for run in report["runs"]:
        rate, share = run["steps"] / run["seconds"], f"{run['effective_time']:.3f}"
        predicted = f"{run['predicted']:.3f} +- {run['predicted_deviation']:.3f}"
        cells = run["name"], run["losses"], f"{run['seconds']:.1f}", f"{rate:.2f}"
        add_row(table, *cells, share, predicted)
        for kind in sorted({kind for kind, _ in run["starts"]}):
            some = [seconds for found, seconds in run["starts"] if found == kind]
            lines.append(
                f"{run['name']}, a {kind} lost: next step after "
                f"{statistics.median(some):.2f} s (median of {len(some)}, "
                f"{min(some):.2f} to {max(some):.2f})"
            )
    console.print(table)
    console.print("\n".join(lines))
