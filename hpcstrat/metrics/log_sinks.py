"""Additional logs to which a log of metrics writes its records: TensorBoard, MLflow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hpcstrat.errors import HpcstratError

_Record = dict[str, Any]


class Sink(Protocol):
    """An additional log, which receives each record that `Log` writes to its file."""

    def open(self, folder: Path) -> None:
        """Prepare the sink for the log's folder; called before each other method."""

    def write(self, record: _Record) -> None:
        """Write a record to the sink."""

    def cut(self, kept: Sequence[_Record], removed: Sequence[_Record]) -> None:
        """Remove all records except the kept records."""

    def flush(self) -> None:
        """Make all records visible to readers."""

    def close(self) -> None:
        """Write all records, and close the sink."""


def missing(library: str, package: str) -> HpcstratError:
    return HpcstratError(
        f"expected {library}, found none; install it: pip install {package}"
    )


class TensorBoard:
    """A sink that writes a log of metrics for TensorBoard.

    After a restore, TensorBoard drops the steps after the checkpoint, and so shows each
    step once. This class needs the package ``tensorboard``.

    Parameters
    ----------
    folder : str or path
        Folder for the files of one log; default: ``tensorboard`` in the log's folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._root = Path()
        self._writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({str(self._folder or self._root)!r})"

    def open(self, folder: Path) -> None:
        """Check that tensorboard is installed; for the library's own modules."""
        self._root = folder
        self._folder = self._folder or folder / "tensorboard"
        try:
            import tensorboard.compat  # noqa: F401
        except ImportError as error:
            raise missing("tensorboard", "tensorboard") from error

    def _add(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder))
        self._writer.add_event(Event(**content))

    def write(self, record: _Record) -> None:
        """Write a record as events; for the library's own modules."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in record.get("scalars", {}).items()
        ]
        values += [_text(name, text) for name, text in record.get("text", {}).items()]
        for name, path in record.get("pictures", {}).items():
            values.append(_picture(name, (self._root / path).read_bytes()))
        about = {"wall_time": record["time"], "step": record["step"]}
        self._add(summary=Summary(value=values), **about)

    def cut(self, kept: Sequence[_Record], removed: Sequence[_Record]) -> None:
        """Let TensorBoard drop the last kept step, and all removed and later steps.

        Kept records of these steps are written again. For the library's own modules."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self.close()
        steps = [record["step"] for record in removed]
        steps.append(max((record["step"] for record in kept), default=0))
        first = min(steps)
        if not kept and not (self._folder and self._folder.exists()):
            return
        session = SessionLog(status=SessionLog.START)
        self._add(wall_time=time.time(), step=first, session_log=session)
        for record in kept:
            if record["step"] >= first:
                self.write(record)
        self.flush()

    def flush(self) -> None:
        """Write buffered events to the file; for the library's own modules."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file; for the library's own modules."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _text(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(
        tag=name,
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
    )


def _picture(name: str, png: bytes) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    # A PNG file has its width at byte 16 and its height at byte 20.
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    image = Summary.Image(
        width=width, height=height, colorspace=3, encoded_image_string=png
    )
    return Summary.Value(tag=name, image=image)


class MLflow:
    """A sink that writes a log of metrics as a run of MLflow.

    MLflow cannot remove values of a metric. Therefore a job that continues from a
    checkpoint begins a new run, writes the kept records to it, and marks the previous
    run as deleted, which ``mlflow gc`` then removes permanently. This class needs the
    package ``mlflow`` or ``mlflow-skinny``.

    Parameters
    ----------
    experiment : str
        Name of the experiment.
    run_name : str, optional
        Name of the run; default: chosen by MLflow.
    tracking_uri : str, optional
        Address of the tracking server; default: from MLflow's own configuration, such
        as ``MLFLOW_TRACKING_URI``.
    """

    _STATE = "mlflow.json"
    _MOST = 500
    _PAUSE_SECONDS = 5.0

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self._experiment = experiment
        self._run_name = run_name
        self._uri = tracking_uri
        self._root = Path()
        self._client: Any = None
        self._run: str | None = None
        self._waiting: list[Any] = []
        self._sent = 0.0

    def __repr__(self) -> str:
        return f"MLflow({self._experiment!r}, run_name={self._run_name!r})"

    def open(self, folder: Path) -> None:
        """Connect to the tracking server; for the library's own modules."""
        if self._client is not None:
            return
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise missing("mlflow", "mlflow-skinny") from error
        self._root = folder
        self._client = MlflowClient(tracking_uri=self._uri)

    def _run_id(self) -> str:
        """Return the id of this log's run; the first call creates the run."""
        if self._run is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = (
                found.experiment_id
                if found is not None
                else self._client.create_experiment(self._experiment)
            )
            run = self._client.create_run(experiment, run_name=self._run_name)
            self._run = str(run.info.run_id)
            # The file is replaced at once, so that a full disk leaves no part of it.
            new = self._root / f"{self._STATE}.new"
            new.write_text(json.dumps({"run_id": self._run}))
            new.replace(self._root / self._STATE)
        return self._run

    def write(self, record: _Record) -> None:
        """Write a record; send numbers in batches. For the library's own modules."""
        from mlflow.entities import Metric

        run, step = self._run_id(), record["step"]
        milliseconds = int(record["time"] * 1000)
        for name, value in record.get("scalars", {}).items():
            self._waiting.append(Metric(name, value, milliseconds, step))
        for name, text in record.get("text", {}).items():
            self._client.log_text(run, text, f"text/{name}/{step}.txt")
        for path in record.get("pictures", {}).values():
            folder = str(Path(path).parent)
            self._client.log_artifact(run, str(self._root / path), folder)
        is_time = time.monotonic() > self._sent + self._PAUSE_SECONDS
        if is_time or len(self._waiting) >= self._MOST:
            self.flush()

    def cut(self, kept: Sequence[_Record], removed: Sequence[_Record]) -> None:
        """Begin a new run with the kept records; for the library's own modules."""
        del removed
        self._waiting.clear()
        state = self._root / self._STATE
        former = json.loads(state.read_text())["run_id"] if state.exists() else None
        self._run = None
        for record in kept:
            self.write(record)
        if former is not None:
            self._client.set_tag(self._run_id(), "hpcstrat_goes_on_from", former)
            self._client.delete_run(former)
        self.flush()

    def flush(self) -> None:
        """Send the waiting numbers; for the library's own modules."""
        self._sent, most = time.monotonic(), self._MOST
        while self._waiting:
            part, self._waiting = self._waiting[:most], self._waiting[most:]
            self._client.log_batch(self._run_id(), metrics=part)

    def close(self) -> None:
        """Send the waiting numbers and end the run; for the library's own modules."""
        if self._client is not None and self._run is not None:
            self.flush()
            self._client.set_terminated(self._run)
