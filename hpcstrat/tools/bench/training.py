"""The built-in training step, its input rows, and the loading of a user's own step.

Every replica calls the user's function once, with the strategy and the number of
examples in a global batch. This function must return another one, which does a step::

    def make_step(strategy, global_batch_size):
        ...
        def step():
            strategy.run(train, args=(next(batches),))
        return step
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.data import Dataset
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers import SGD
from hpcstrat.strategies.base import Strategy
from hpcstrat.tools.bench.measuring import compute
from hpcstrat.tools.bench.run_file import BenchError
from hpcstrat.tools.bench.shapes import MODELS
from hpcstrat.variables import Variable

__all__ = ["StepSize", "TiledRows", "TrainingStep", "load_function", "write_rows"]

# Size of the file of rows, which is read several times.
_FILE_BYTES = 64 << 20
_FILE = "rows.npy"


def write_rows(folder: str, row_bytes: int) -> None:
    """Write the file that `TiledRows` reads. Only one rank may call this function."""
    width = row_bytes // 4
    count = max(1, _FILE_BYTES // row_bytes)
    # Write random data, because a file system cannot compress them.
    rows = np.random.default_rng(0).random((count, width), np.float32)
    np.save(os.path.join(folder, _FILE), rows)


class TiledRows:
    """A data source of ``count`` rows, which repeats the rows of a file."""

    def __init__(self, folder: str, count: int) -> None:
        # Convert from np.memmap to np.ndarray, so that slices are plain arrays, too.
        file = np.load(os.path.join(folder, _FILE), mmap_mode="r")
        self._rows = np.asarray(file)
        self.shape = (count, *self._rows.shape[1:])
        self.dtype = self._rows.dtype

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> Array:
        places = np.arange(rows.start, rows.stop) % len(self._rows)
        taken: Array = np.take(self._rows, places, axis=0)
        return taken


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a built-in step: ``batch_size`` examples take ``compute_seconds``.

    ``global_batch_size`` is the number of examples of all replicas together.
    """

    model: str
    compute_seconds: float
    batch_size: int
    global_batch_size: int


class TrainingStep:
    """A step that reads a batch, computes, applies gradients, and sums a loss.

    Making the object and calling it are collective over the strategy's replicas. It can
    be called ``num_steps`` times.
    """

    def __init__(
        self, strategy: Strategy, size: StepSize, folder: str, num_steps: int
    ) -> None:
        self.strategy = strategy
        # Time per example: in strong scaling a replica has fewer examples.
        self.seconds_each = size.compute_seconds / size.batch_size
        shapes = MODELS[size.model]()
        with strategy.scope():
            self.variables = [
                Variable(np.zeros(shape, np.float32), name=f"weights_{number}")
                for number, shape in enumerate(shapes)
            ]
            self.optimizer = SGD(0.01)
        # Gradients are zeros, so that variables do not change in any number of steps.
        self.gradients = [np.zeros(shape, np.float32) for shape in shapes]
        rows = TiledRows(folder, size.global_batch_size * num_steps)
        dataset = Dataset(rows, size.global_batch_size)
        self.batches = iter(strategy.experimental_distribute_dataset(dataset))

    def __call__(self) -> None:
        """Do one training step."""
        batch = next(self.batches)
        loss = self.strategy.run(self._train, args=(batch,))
        self.strategy.reduce("sum", loss)

    def _train(self, batch: Array) -> float:
        compute(self.seconds_each * len(batch))
        pairs = zip(self.gradients, self.variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return 1.0


def load_function(name: str) -> Callable[[Strategy, int], Callable[[], Any]]:
    """Return the user's function ``module:function``; raise BenchError on failure."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise BenchError(f"expected --step module:function, found {name!r}; name both")
    # Also find modules in the current folder, like python -m.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BenchError(
            f"expected --step to name a function, found {name!r}: {error}; start in "
            "the folder of the module, or set PYTHONPATH"
        ) from error
    if not callable(found):
        raise BenchError(
            f"expected --step to name a function, found {type(found).__name__} as "
            f"{name!r}; name a function that makes a step"
        )
    function: Callable[[Strategy, int], Callable[[], Any]] = found
    return function
