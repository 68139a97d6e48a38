"""The page's table of all public names of tf.distribute, and of hpcstrat's names.

``python -m tests.docs.reference_names`` writes the table into the page. A name that
this module does not mention has the same name in ``hs``, and behaves as a port expects.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.docs.reference_surface import VERSION, captured

__all__ = [
    "BEGIN",
    "END",
    "ERRORS",
    "LEFT_OUT",
    "PAGE",
    "SAME",
    "Row",
    "rows",
    "written",
]

PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "tf-distribute.md"
BEGIN = "<!-- begin of the table of names -->"
END = "<!-- end of the table of names -->"

SAME, ERROR = "same", "error"


@dataclass(frozen=True)
class Row:
    """A row of the table: a name in hpcstrat, whether it is an error, and a note.

    ``declared`` is a row of the page of divergences with details.
    """

    name: str
    versions: tuple[int, ...]
    here: str
    status: str = SAME
    note: str = ""
    declared: str = ""


_TPU = ("an error that names `MultiWorkerMirroredStrategy`", "no-tpu")
_CLOUD = ("an error that says how to start the program", "no-cloud")
_RPC = ("an error that names `ClusterCoordinator`", "no-rpc")
_WATCHER = ("an error that names `PreemptionCheckpointHandler`", "no-tpu")
# Names that raise errors, with their members, and their replacements.
ERRORS = {
    "TPUStrategy": _TPU,
    "cluster_resolver.GCEClusterResolver": _CLOUD,
    "cluster_resolver.KubernetesClusterResolver": _CLOUD,
    "cluster_resolver.TPUClusterResolver": _TPU,
    "experimental.PreemptionWatcher": _WATCHER,
    "experimental.TPUStrategy": _TPU,
    "experimental.rpc.Client": _RPC,
    "experimental.rpc.Server": _RPC,
    "Server.create_local_server": ("an error that names `mpirun`", "server-joins"),
}
# The note for each name, and its row in the page of divergences.
_NOTES = {
    "CrossDeviceOps": (
        "strategies call the hooks of subclasses; a PerReplica has this rank's value",
        "own-hooks",
    ),
    "DistributedDataset.element_spec": (
        "for a `hs.Dataset`; an error for an iterable",
        "element-spec",
    ),
    "DistributedIterator.element_spec": (
        "for a `hs.Dataset`; an error for an iterable",
        "element-spec",
    ),
    "MirroredStrategy": ("one rank for each device", ""),
    "ParameterServerStrategy": ("roles by rank, or by a resolver", ""),
    "ReplicaContext": ("made by `run`", "own-strategies"),
    "Server": ("serves in `join`", "server-joins"),
    "Server.start": ("nothing to do", "server-joins"),
    "Strategy": ("make one of its subclasses", "own-strategies"),
    "Strategy.configure": ("nothing to do", "no-sessions"),
    "Strategy.update_config_proto": ("returns its argument", "no-sessions"),
    "Strategy.group": ("None, or the value of one replica", "no-sessions"),
    "Strategy.unwrap": ("`experimental_local_results`", "local-results"),
    "StrategyExtended": ("made by the strategy", "own-strategies"),
    "StrategyExtended.value_container": ("returns its argument", "component-objects"),
    "StrategyExtended.should_checkpoint": ("on replica 0", "should-checkpoint"),
    "StrategyExtended.should_save_summary": ("on replica 0", "should-checkpoint"),
    "StrategyExtended.experimental_should_init": ("on replica 0", "should-checkpoint"),
    "coordinator.PerWorkerValue": ("made by the coordinator", "own-strategies"),
    "experimental.coordinator.PerWorkerValues": (
        "made by the coordinator",
        "own-strategies",
    ),
    "experimental.ParameterServerStrategy": (
        "that of `tf.compat.v1` is `hs.ParameterServerStrategyV1`",
        "",
    ),
    "experimental.PreemptionCheckpointHandler": (
        "with a `CheckpointManager`, which knows its folder",
        "preemption-count",
    ),
}
# Parameters of tf.distribute that hpcstrat lacks; the note or the row says why.
LEFT_OUT = {
    "Strategy": {"extended"},
    "StrategyExtended": {"container_strategy"},
    "coordinator.PerWorkerValue": {"values"},
    "experimental.coordinator.PerWorkerValues": {"values"},
}


def rows() -> list[Row]:
    """Return a row for each captured name, in the captured order."""
    found = []
    for name, entry in captured().items():
        owner = next(
            (of for of in ERRORS if name == of or name.startswith(f"{of}.")), None
        )
        status = SAME if owner is None else ERROR
        note, declared = _NOTES.get(name, ("", "")) if owner is None else ERRORS[owner]
        versions = tuple(entry["versions"])
        found.append(Row(name, versions, f"hs.{name}", status, note, declared))
    return found


def table() -> str:
    """Return the rows as a table; members without a note join their class's row."""
    lines = ["| tf.distribute | version | here |", "|---|---|---|"]
    known, members = rows(), dict[str, list[str]]()
    classes = [n for n, e in captured().items() if e["kind"] in ("class", "module")]
    own = []
    for row in known:
        owner, _, member = row.name.rpartition(".")
        joins = row.note == "" and row.status == SAME
        joins = joins or owner in ERRORS
        if owner in classes and captured()[owner]["kind"] == "class" and joins:
            members.setdefault(owner, []).append(_member(row, member))
        else:
            own.append(row)
    for row in own:
        shown = f"`{row.name}`"
        if row.name in members:
            shown += f": {', '.join(members[row.name])}"
        said = row.note
        if row.declared:
            said += f" (`{row.declared}`)"
        here = f"`{row.here}`" + (f": {said}" if said else "")
        lines.append(f"| {shown} | {_versions(row)} | {here} |")
    return "\n".join(lines)


def _member(row: Row, member: str) -> str:
    return f"`{member}`" + (" (v1)" if row.versions == (1,) else "")


def _versions(row: Row) -> str:
    return {(1,): "v1", (2,): "v2"}.get(row.versions, "both")


def written(page: str) -> str:
    """Return the text of the page with the current table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    intro = (
        f"These are the {len(rows())} public names of `tf.distribute` {VERSION} (v2) "
        "and of `tf.compat.v1.distribute` (v1), without\nmembers that a class inherits "
        "from another one of them. The word in parentheses is the [row of\ndivergences]"
        "(../divergences.md) with the details. hpcstrat also has `hs.function` for "
        "`tf.function`,\n`strategy.experimental_run_v2`, and accepts "
        "`VariableAggregation.SUM` as a `ReduceOp`.\n"
    )
    return f"{before}{BEGIN}\n{intro}\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
