"""A callback that collects predictions of all ranks in the order of the rows."""

from __future__ import annotations

import os
from typing import Any

from hpcstrat.data import PredictionWriter
from hpcstrat.data.elements import ArraySpec
from hpcstrat.engine.arrays.kinds import as_array, to_host
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Tree
from hpcstrat.integrations.lightning.trainer_package import (
    BasePredictionWriter,
    CombinedLoader,
)
from hpcstrat.strategies import MultiWorkerMirroredStrategy, Strategy

__all__ = ["OrderedPredictions"]

_WHAT = "predictions of Lightning"


class OrderedPredictions(BasePredictionWriter):
    """Collects the results of ``trainer.predict`` in the order of the dataset's rows.

    Collective over all ranks of the job. Each row counts once, whatever sampler divides
    the rows: Lightning's own, or a ``GlobalBatchSampler``. Pass
    ``return_predictions=False`` to ``predict``, so that Lightning does not keep a list
    of each rank's batches as well.

    Parameters
    ----------
    path : str or path, optional
        HDF5 file or Zarr store, which all ranks write; see
        `hpcstrat.data.PredictionWriter`. Default: memory.

    Attributes
    ----------
    predictions : nested structure of ndarray of shape (num_rows, ...), or list of these
        After ``predict``, the predictions of all rows on every rank, in the structure
        that ``predict_step`` returns; a list if there are several loaders. None with a
        path.

    Raises
    ------
    ValueError
        In ``predict``: for predictions without one row for each row of a batch, a
        loader whose rows Lightning does not know, several loaders with a path, or rows
        that are not predicted, such as with ``limit_predict_batches``.

    Examples
    --------
    >>> import hpcstrat.integrations.lightning as hsl
    >>> hsl.OrderedPredictions("energies.h5")
    OrderedPredictions('energies.h5')
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__("batch")
        self._path = path
        self.predictions: Any = None
        self._strategy: Strategy | None = None
        self._writers: list[PredictionWriter | None] = []

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({'' if self._path is None else repr(self._path)})"
        )

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the loaders, and make a communicator."""
        loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
        if self._path is not None and len(loaders) > 1:
            raise ValueError(
                f"expected one loader for predictions in {str(self._path)!r}, found "
                f"{len(loaders)}; call predict for each of them, with another path"
            )
        self._num_rows = [len(loader.dataset) for loader in loaders]
        self._writers = []
        self._strategy = MultiWorkerMirroredStrategy()

    def write_on_batch_end(self, *given: Any) -> None:
        """Add this rank's predictions of a batch."""
        _, _, prediction, batch_indices, _, _, number = given
        leaves, structure = flatten(prediction)
        arrays = [to_host(as_array(leaf)) for leaf in leaves]
        count = len(batch_indices or ())
        if any(array.shape[:1] != (count,) for array in arrays):
            raise ValueError(
                f"expected predictions of the {count} rows of a batch whose numbers "
                "Lightning knows, found arrays of shapes "
                f"{', '.join(str(array.shape) for array in arrays)}; return one row "
                "for each row from predict_step, and pass a DataLoader of a dataset "
                "with numbered rows"
            )
        like = [ArraySpec(array.shape[1:], array.dtype) for array in arrays]
        writer = self._opened(number, unflatten(structure, like))
        assert writer is not None
        writer.add(batch_indices, unflatten(structure, arrays))

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Complete the predictions of all ranks."""
        whole = []
        for number in range(len(self._num_rows)):
            writer = self._opened(number, None)
            whole.append(None if writer is None else writer.result())
        self.predictions = whole[0] if len(whole) == 1 else whole
        assert self._strategy is not None
        self._strategy.close()

    def _opened(self, number: int, like: Tree | None) -> PredictionWriter | None:
        """Return a loader's writer; the first call for a loader is collective.

        A rank calls this function at its first batch, or without any batch at the end.
        The result is None if no rank has a batch.
        """
        assert self._strategy is not None
        while len(self._writers) <= number:
            own = like if len(self._writers) == number else None
            found = self._strategy.collectives.all_gather_object(own, _WHAT)
            known = next((spec for spec in found if spec is not None), None)
            rows = self._num_rows[len(self._writers)]
            writer = None
            if known is not None:
                writer = PredictionWriter(self._strategy, rows, known, self._path)
            self._writers.append(writer)
        return self._writers[number]
