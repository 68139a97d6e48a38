"""The steps of programs that use checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs
from tests.conformance.session import Frame, Session, variable_kind

__all__ = ["CHECKPOINT_STEPS"]


def _manager(session: Session, variables: Mapping[str, Any], *, saves: bool) -> Any:
    """Return a manager over the program's folder of checkpoints.

    Plain variables outside of every scope belong to one rank. Each rank then saves into
    a separate folder, and later steps read the folder of the first rank. In a scope,
    the strategy saves into one folder for all ranks.
    """
    plain = all(variable_kind(variable) == "plain" for variable in variables.values())
    folder = "checkpoints"
    if plain and saves and session.rank and not hs.has_strategy():
        folder += f"-rank{session.rank}"
    directory = str(session.directory / folder)
    return hs.CheckpointManager(directory, independent=plain, **variables)


def _op_save(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    variables = {name: session.variables[name] for name in step["vars"]}
    _manager(session, variables, saves=True).save()
    if all(variable_kind(variable) == "plain" for variable in variables.values()):
        # The other ranks read the first rank's folder, so they wait for the save.
        session.strategy.barrier()


def _op_restore(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    variables = {name: session.variables[var] for name, var in step["map"].items()}
    _manager(session, variables, saves=False).restore()


def _newest(directory: Path) -> Path:
    """Return the checkpoint file with the highest step."""
    return max(directory.glob("ckpt-*.h5"))


def _op_checkpoint_value(session: Session, frame: Frame, step: dict[str, Any]) -> Any:
    import h5py

    # A checkpoint is an ordinary HDF5 file, with the variables under /variables.
    path = _newest(session.directory / "checkpoints")
    with h5py.File(path, "r", locking=False) as file:
        dataset = file["variables"][step["name"]]
        value = dataset[()]
        how = dataset.attrs["aggregation"]
        how = how.decode() if isinstance(how, bytes) else how
        # With logical replicas, the file has all components, which its reader combines.
        if "replica_axis" in dataset.attrs and how != "none":
            combined = {"sum": value.sum(0), "mean": value.mean(0)}.get(how, value[0])
            value = np.asarray(combined, dataset.dtype)
        return value


CHECKPOINT_STEPS = {
    "save": _op_save,
    "restore": _op_restore,
    "checkpoint_value": _op_checkpoint_value,
}
