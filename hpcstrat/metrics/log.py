"""A log of numbers, texts and pictures, truncated when a checkpoint is restored."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.context import pop, push
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array
from hpcstrat.engine.values import Adopted, DistributedValues
from hpcstrat.metrics.log_file import LogFile
from hpcstrat.metrics.log_sinks import Sink
from hpcstrat.strategies import (
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
)
from hpcstrat.strategies.replica_context import ReplicaContext
from hpcstrat.variables import Variable

_PICTURES = "pictures"


class Log:
    """A log of metrics that has each step only once, even if the job is requeued.

    Pass the log to the `CheckpointManager` together with the model: a checkpoint then
    contains the length of the log, and a restore truncates the log to that length. The
    removed lines are appended to ``metrics.removed.jsonl``. If a training begins
    without a restore, all lines of an existing log are moved there.

    Parameters
    ----------
    folder : str or path
        The folder of the file ``metrics.jsonl``, to which replica 0 writes one line of
        JSON for each call.
    sinks : sequence of TensorBoard, MLflow, WeightsAndBiases
        Additional logs, which a restore truncates in the same way.
    strategy : Strategy, optional
        Default: the current strategy. A job of several ranks needs a strategy.

    Raises
    ------
    ValueError
        If there is no strategy in a job of several ranks.

    Examples
    --------
    >>> import tempfile
    >>> import hpcstrat as hs
    >>> folder = tempfile.mkdtemp()
    >>> log = hs.metrics.Log(folder)
    >>> weights = hs.Variable(1.0, name="weights")
    >>> manager = hs.CheckpointManager(folder, weights=weights, log=log)
    >>> log.scalars(1, loss=0.5)
    >>> _ = manager.save(1)
    >>> log.scalars(2, loss=0.25)
    >>> manager.restore()
    1
    >>> [record["scalars"] for record in hs.metrics.read_log(folder)]
    [{'loss': 0.5}]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sinks: Sequence[Sink] = (),
        strategy: Strategy | None = None,
    ) -> None:
        if (
            strategy is None
            and not has_strategy()
            and launch_from_environment().size > 1
        ):
            raise ValueError(
                "expected the strategy whose replica 0 writes the log, found none in a "
                "job of several ranks; pass strategy=, or make it in the scope"
            )
        self.folder = Path(folder).absolute()
        self._strategy = strategy or get_strategy()
        self._file = LogFile(self.folder)
        self._sinks = list(sinks)
        # True after the lines of an earlier training have been kept or removed.
        self._is_begun = False
        token = push(self._strategy.cross_context)
        try:
            self._place = Variable(
                Adopted(np.zeros(2, np.uint64), is_equal=True),
                trainable=False,
                synchronization="on_read",
                aggregation="only_first_replica",
                name="place",
            )
        finally:
            pop(token)

    def __repr__(self) -> str:
        return f"Log({str(self.folder)!r})"

    def scalars(
        self,
        step: int,
        values: Mapping[str, Any] | None = None,
        *,
        of: int | str = 0,
        **more: Any,
    ) -> None:
        """Log numbers of a step; all replicas make this call, in or out of `run`.

        Collective over the strategy's replicas, unless ``of`` is 0.

        Parameters
        ----------
        step : int
            Step of the training.
        values : dict of str to scalar, optional
            Numbers by name.
        of : int or str
            The replica whose numbers are logged; or ``"mean"`` or ``"sum"``, to log the
            mean or sum over all replicas, with one reduction.
        **more : scalar
            More numbers, by name.
        """
        given = {**(values or {}), **more}
        if isinstance(of, str):
            given = self._reduced(of, given)
        else:
            given = self._from(of, given)
        if self._writes():
            numbers = {name: float(value) for name, value in given.items()}
            self._append(step, scalars=numbers)

    def text(self, step: int, name: str, text: str, *, of: int = 0) -> None:
        """Log a text of a step.

        Collective over the strategy's replicas, unless ``of`` is 0.

        Parameters
        ----------
        step : int
            Step of the training.
        name, text : str
            Name of the text, and the text, which TensorBoard shows as Markdown.
        of : int
            The replica whose text is logged.
        """
        text = self._from(of, text)
        if self._writes():
            self._append(step, text={name: text})

    def picture(self, step: int, name: str, picture: Any, *, of: int = 0) -> None:
        """Log a picture of a step, as a PNG file.

        Collective over the strategy's replicas, unless ``of`` is 0.

        Parameters
        ----------
        step : int
            Step of the training.
        name : str
            Name of the picture, and of a file in the folder ``pictures``.
        picture : array of shape (height, width) or (height, width, 3), or a figure
            An array of uint8, or of numbers from 0 to 1, which needs Pillow; or a
            matplotlib figure.
        of : int
            The replica whose picture is logged.
        """
        own = None
        if not of:
            own = _as_png(picture) if self._writes() else None
        else:
            # If drawing fails on one replica, all replicas raise an error.
            with self._strategy.collectives.all_raise("a picture for the log"):
                own = _as_png(picture) if self._is(of) else None
        own = self._from(of, own)
        if self._writes():
            self._begin()
            path = self._free_name(f"{_PICTURES}/{name}/{step}")
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            try:
                (self.folder / path).write_bytes(own)
                self._append(step, pictures={name: path})
            except OSError:
                (self.folder / path).unlink(missing_ok=True)
                raise

    def flush(self) -> None:
        """Write all records to the disk (fsync), and flush the sinks.

        Not collective.
        """
        self._file.place()
        self._tell("flush")

    def close(self) -> None:
        """Close the file and the sinks.

        Not collective.
        """
        self._file.close()
        self._tell("close")

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the position in the log; for the library's own modules.

        When the call returns, all lines before that position are on the disk."""
        self._tell("flush")
        place = self._file.place()
        # The variable's aggregation saves the value of replica 0, which writes the log.
        np.copyto(self._place.component, np.array(place, np.uint64))
        return {"place": self._place}

    def checkpoint_spellings(self, name: str) -> list[str]:
        """Return all names of the position in files; for the library's own modules."""
        return [name]

    def checkpoint_defer(
        self, name: str, value: Array, strategy: Any = None, *, is_part: bool = False
    ) -> None:
        """Raise ValueError, because a log has no saved state but its position.

        For the library's own modules."""
        raise ValueError(
            f"expected the place of a log, found {name!r}; restore what was saved"
        )

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Truncate the log to its restored position; for the library's own modules."""
        collectives, what = self._strategy.collectives, "restore of the log of metrics"
        with collectives.all_raise(what):
            if self._strategy.writes:
                position, digest = (int(number) for number in self._place.component)
                self._cut((position, digest))
        # If replica 0 cannot truncate the log, the other replicas raise here.
        collectives.barrier(what)

    def _reduced(self, how: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the sum or mean of each value over all replicas, as ``how`` says."""
        context = self._context()
        # Each distributed value needs its own call of ``Strategy.reduce``.
        apart = {n: v for n, v in values.items() if isinstance(v, DistributedValues)}
        # If a value on one replica is not a number, all replicas raise an error.
        with self._strategy.collectives.all_raise("numbers for the log"):
            plain = {n: np.float64(v) for n, v in values.items() if n not in apart}
        found = {
            name: self._strategy.reduce(how, value, axis=None)
            for name, value in apart.items()
        }
        if plain and context is None:
            found |= self._strategy.reduce(how, plain, axis=None)
        elif plain and context is not None:
            found |= context.all_reduce(how, plain)
        return found

    def _from(self, replica: int, value: Any) -> Any:
        """Return the value that a replica passed; only replica 0 uses the result."""
        if replica == 0:
            return value
        collectives = self._strategy.collectives
        return collectives.broadcast_object(value, replica, "value for the log")

    def _context(self) -> ReplicaContext | None:
        """Return the replica context inside `Strategy.run`; outside, None."""
        context = get_replica_context()
        return context if context and context.strategy is self._strategy else None

    def _is(self, replica: int) -> bool:
        context = self._context()
        if context is None:
            return bool(self._strategy.replica_id == replica)
        return bool(context.strategy.replica_id == replica)

    def _writes(self) -> bool:
        """Return whether this replica writes the log, on this rank."""
        return self._is(0) and self._strategy.inside.position == 0

    def _begin(self) -> None:
        """Before the first record, remove the lines of an earlier training."""
        if not self._is_begun:
            self._cut(LogFile(self.folder).place())

    def _cut(self, place: tuple[int, int]) -> None:
        kept, removed = self._file.cut(*place)
        self._is_begun = True
        known = {path for record in kept for path in record.get(_PICTURES, {}).values()}
        for record in removed:
            for path in record.get(_PICTURES, {}).values():
                if path not in known:
                    (self.folder / path).unlink(missing_ok=True)
        self._tell("cut", kept, removed)

    def _append(self, step: int, **content: Any) -> None:
        self._begin()
        record = {"step": int(step), "time": round(time.time(), 3), **content}
        self._file.append(record)
        self._tell("write", record)

    def _free_name(self, path: str) -> str:
        """Return a file name that no other picture of the same step and name has."""
        others = 0
        while (
            self.folder / (found := f"{path}{f'-{others}' * (others > 0)}.png")
        ).exists():
            others += 1
        return found

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call a method of each sink; remove a sink that raises an error."""
        if not self._is_begun:
            return
        for sink in [*self._sinks]:
            try:
                sink.open(self.folder)
                getattr(sink, method)(*arguments)
            except Exception as error:
                self._sinks.remove(sink)
                get_logger("metrics").warning(
                    "%s receives no more of the log in %s, whose own files stay "
                    "complete: %s: %s",
                    type(sink).__name__,
                    self.folder,
                    type(error).__name__,
                    error,
                )


def _as_png(picture: Any) -> bytes:
    """Return a picture as the bytes of a PNG file."""
    stream = io.BytesIO()
    if hasattr(picture, "savefig"):
        picture.savefig(stream, format="png")
        return stream.getvalue()
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "expected Pillow for pictures of arrays, found none; install it: "
            "pip install pillow"
        ) from error
    array = np.asarray(picture)
    is_color = array.ndim == 3 and array.shape[-1] == 3
    if array.ndim != 2 and not is_color:
        raise ValueError(
            "expected a picture of shape (height, width) or (height, width, 3), found "
            f"{array.shape}; choose one, or draw it"
        )
    if array.dtype != np.uint8:
        array = (np.clip(array, 0, 1) * 255).round().astype(np.uint8)
    Image.fromarray(array).save(stream, format="png")
    return stream.getvalue()
