"""The tasks of a Flux job."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from hpcstrat.cluster_resolver.allocation import AllocationClusterResolver, Placement
from hpcstrat.cluster_resolver.batch_job import output_of
from hpcstrat.cluster_resolver.node_list import expand_node_list

__all__ = ["FluxClusterResolver"]


class FluxClusterResolver(AllocationClusterResolver):
    """The tasks that ``flux run`` has started, in any placement on the nodes.

    The environment has only this task's own numbers; the constructor runs ``flux job``
    to find the nodes and places of all tasks. Parameters and attributes are those of
    `SlurmClusterResolver`, without ``tasks_per_node``. By default, ``gpus_per_node`` is
    the number of GPUs that Flux has allocated to the job on this node.

    Raises
    ------
    RuntimeError
        Outside of a Flux job, or if the command ``flux`` fails.
    """

    def _find_placement(self, env: Mapping[str, str]) -> Placement:
        job, rank = env.get("FLUX_JOB_ID", ""), env.get("FLUX_TASK_RANK", "")
        if not job or not rank.isdecimal():
            raise RuntimeError(
                "expected a task of a Flux job, found no FLUX_JOB_ID and FLUX_TASK_RANK"
                " in the environment; start the program with flux run"
            )
        resources = json.loads(_ask(env, "info", job, "R"))["execution"]
        nodes = [
            name for part in resources["nodelist"] for name in expand_node_list(part)
        ]
        places = _places(json.loads(_ask(env, "taskmap", job)))
        gpus = _gpus(resources["R_lite"])[places[int(rank)][0]]
        return Placement(int(rank), nodes, places, gpus)


def _ask(env: Mapping[str, str], *words: str) -> str:
    try:
        return output_of(["flux", "job", *words], env)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise RuntimeError(
            f"expected `flux job {' '.join(words)}` to answer, found: {said}; have the "
            "command flux in the PATH of the job, and keep FLUX_URI"
        ) from error


def _places(task_map: list[list[int]]) -> list[tuple[int, int]]:
    """Return each rank's node, and the rank's number on this node.

    A task map (Flux RFC 34) has blocks: first node, nodes, tasks per node, repeats.
    """
    places: list[tuple[int, int]] = []
    counts: dict[int, int] = {}
    for first, nodes, tasks, repeats in task_map:
        for _ in range(repeats):
            for node in range(first, first + nodes):
                for _ in range(tasks):
                    places.append((node, counts.get(node, 0)))
                    counts[node] = counts.get(node, 0) + 1
    return places


def _gpus(parts: list[dict[str, object]]) -> list[int]:
    """Return the number of GPUs of each node of the job, from Flux RFC 20's format."""
    found: dict[int, int] = {}
    for part in parts:
        children = part["children"]
        assert isinstance(children, dict)
        number = len(_ids(str(children.get("gpu", ""))))
        found |= dict.fromkeys(_ids(str(part["rank"])), number)
    return [found[rank] for rank in sorted(found)]


def _ids(text: str) -> list[int]:
    """Return the numbers in a set in Flux's notation, such as 0-3,7."""
    names = expand_node_list(f"[{text}]") if text else []
    return [int(name) for name in names]
