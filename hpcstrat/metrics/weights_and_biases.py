"""An additional log to which a log of metrics writes its records: Weights & Biases."""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcstrat.metrics.log_sinks import missing

__all__ = ["WeightsAndBiases"]

_Record = dict[str, Any]


class WeightsAndBiases:
    """A sink that writes a log of metrics as a run of Weights & Biases.

    Each value is logged with the number ``step``, which is the x axis of all charts.
    Weights & Biases cannot remove values of a run. Therefore a job that continues from
    a checkpoint begins a new run in the same group, and writes the kept records to it.
    The folder of the former run is removed, if this run was offline and not uploaded
    yet; a run on the server is kept, and is named in the new run's configuration as
    ``hpcstrat_goes_on_from``. This class needs the package ``wandb``.

    Parameters
    ----------
    project : str
        Name of the project.
    run_name : str, optional
        Name of the run; default: chosen by Weights & Biases.
    mode : str, optional
        ``"offline"`` writes files below the log's folder, which ``wandb sync`` uploads
        from a machine with internet access; ``"online"`` sends all values to the
        server. Default: from ``WANDB_MODE``, or ``"online"``.
    entity : str, optional
        The user or team; default: from the configuration of Weights & Biases.
    """

    _STATE = "wandb.json"

    def __init__(
        self,
        project: str,
        *,
        run_name: str | None = None,
        mode: str | None = None,
        entity: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "project": project,
            "name": run_name,
            "mode": mode,
            "entity": entity,
        }
        self._root = Path()
        self._run: Any = None
        # The first run of this log, and the run before this one.
        self._group: str | None = None
        self._former: str | None = None

    def __repr__(self) -> str:
        name, mode = self._options["name"], self._options["mode"]
        project = self._options["project"]
        return f"WeightsAndBiases({project!r}, run_name={name!r}, mode={mode!r})"

    def open(self, folder: Path) -> None:
        """Check that wandb is installed; for the library's own modules."""
        self._root = folder
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise missing("wandb", "wandb") from error

    def _begun(self) -> Any:
        """Return the run; the first call begins it."""
        if self._run is None:
            import wandb

            settings = wandb.Settings(silent=True, console="off")
            config = {"hpcstrat_goes_on_from": self._former} if self._former else {}
            self._run = wandb.init(
                **self._options,
                dir=self._root,
                config=config,
                group=self._group,
                # A run that the program has begun itself stays as it is.
                reinit="create_new",
                settings=settings,
            )
            self._run.define_metric("*", step_metric="step")
            state = {
                "id": self._run.id,
                "group": self._group or self._run.id,
                "folder": str(Path(self._run.dir).parent),
            }
            # The file is replaced at once, so that a full disk leaves no part of it.
            new = self._root / f"{self._STATE}.new"
            new.write_text(json.dumps(state))
            new.replace(self._root / self._STATE)
        return self._run

    def write(self, record: _Record) -> None:
        """Write a record; for the library's own modules."""
        import wandb

        values: dict[str, Any] = dict(record.get("scalars", {}))
        for name, text in record.get("text", {}).items():
            values[name] = wandb.Html(f"<pre>{html.escape(text)}</pre>")
        for name, path in record.get("pictures", {}).items():
            values[name] = wandb.Image(str(self._root / path))
        self._begun().log({"step": record["step"], **values})

    def cut(self, kept: Sequence[_Record], removed: Sequence[_Record]) -> None:
        """Begin a new run with the kept records; for the library's own modules."""
        del removed
        self.close()
        path = self._root / self._STATE
        former = json.loads(path.read_text()) if path.exists() else None
        if former is not None:
            self._group, self._former = former["group"], former["id"]
        for record in kept:
            self.write(record)
        if former is not None:
            _remove_unsent(Path(former["folder"]), self._root)

    def flush(self) -> None:
        """Do nothing: wandb writes each record. For the library's own modules."""

    def close(self) -> None:
        """End the run; for the library's own modules."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _remove_unsent(folder: Path, root: Path) -> None:
    """Remove the folder of an offline run that was not uploaded."""
    is_offline = folder.name.startswith("offline-run-")
    is_offline = is_offline and root.resolve() in folder.resolve().parents
    if is_offline and not list(folder.glob("*.synced")):
        shutil.rmtree(folder, ignore_errors=True)
