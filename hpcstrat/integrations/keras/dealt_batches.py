"""Streams and iterables, which one rank of each worker reads for all its replicas."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from hpcstrat.data import Dataset, DistributedDataset
from hpcstrat.data.iterator import ReducibleDataset
from hpcstrat.integrations.frameworks import refuse_logical_replicas
from hpcstrat.integrations.keras.py_dataset import Batches, columns_of, for_backend
from hpcstrat.strategies import Strategy

__all__ = ["DealtBatches", "dealt", "ends_with_its_data"]


class DealtBatches(DataAdapter):
    """A data adapter for Keras that yields this replica's rows of global batches.

    Reading a batch is collective over the strategy's replicas. ``num_batches`` is the
    number of batches of an epoch, or None if it is unknown.
    """

    num_batches: int | None = None
    batch_size = has_partial_batch = partial_batch_size = None

    def __init__(
        self,
        dataset: ReducibleDataset,
        strategy: Strategy,
        num_batches: int | None,
        source: _NumpyBatches | None = None,
    ) -> None:
        self._dataset = dataset
        self._strategy = strategy
        self.num_batches = num_batches
        # Set for a ``PyDataset``, of which every rank has one: a new iteration may read
        # its first batch again, and Keras tells it where epochs begin and end.
        self._source = source
        # True if each iteration over a ``PyDataset`` has its own order of batches.
        self.shuffle = False
        self._class_weight: Any = None
        # The first batch, and the iterator over later batches, until `elements` runs.
        self._begun: tuple[Any, Iterator[Any]] | None = None

    def weigh(self, class_weight: Any) -> None:
        """Set the ``class_weight`` of ``fit``, which a data adapter must apply."""
        self._class_weight = class_weight

    def on_epoch_begin(self) -> None:
        """Tell a ``PyDataset`` that an epoch begins; Keras calls this method."""
        if self._source is not None:
            self._source.batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell a ``PyDataset`` that an epoch has ended, after which it may change.

        Keras calls this method also before the first epoch.
        """
        if self._source is not None:
            self._begun = None
            self._source.batches.on_epoch_end()

    def _iteration(self) -> Iterator[Any]:
        """Begin an iteration; every rank gets the order that replica 0 draws."""
        if self._source is not None:
            count = self.num_batches
            self._source.order = None if count is None else list(range(count))
            if self.shuffle and count is not None:
                # Keras draws from the same generator, and so do all ranks here.
                order = list(range(count))
                random.shuffle(order)
                collectives = self._strategy.collectives
                self._source.order = collectives.broadcast_object(
                    order, 0, "order of batches"
                )
        return iter(self._dataset)

    @property
    def is_repeatable(self) -> bool:
        """True if Keras may read the first batch, and read it again."""
        return self._source is not None

    @property
    def first(self) -> Any:
        """This replica's part of the first batch, which `elements` still yields."""
        if self._begun is None:
            batches = self._iteration()
            batch = next(batches, None)
            if batch is None:
                raise ValueError(
                    "expected at least one batch, found none; a generator gives its "
                    "batches once"
                )
            self._begun = self._own(batch), batches
        return self._begun[0]

    def elements(self) -> Iterator[Any]:
        """Yield this replica's part of each batch of an epoch, from the first batch."""
        yield self.first
        assert self._begun is not None
        batches, self._begun = self._begun[1], None
        for batch in batches:
            yield self._own(batch)

    def _own(self, batch: Any) -> Any:
        return self._part(self._strategy.local_value(batch))

    def _part(self, own: Any) -> Any:
        own = tuple(own) if isinstance(own, (tuple, list)) else (own,)
        if self._class_weight is not None and len(own) == 2:
            weigh = data_adapter_utils.class_weight_to_sample_weights
            own = *own, weigh(own[1], self._class_weight)
        return for_backend(own)

    def get_numpy_iterator(self) -> Any:
        return data_adapter_utils.get_numpy_iterator(self.elements())

    def get_jax_iterator(self) -> Any:
        return data_adapter_utils.get_jax_iterator(self.elements())

    def get_torch_dataloader(self) -> Any:
        return data_adapter_utils.get_torch_dataloader(self.elements())

    def get_tf_dataset(self) -> Any:
        import tensorflow as tf

        # Each iteration of a ``PyDataset`` draws an order, so look at a batch of it.
        source = self._source
        batch = self.first if source is None else self._part(_plain(source.batches[0]))
        signature = data_adapter_utils.get_tensor_spec([batch])
        make = tf.data.Dataset.from_generator
        # Switch prefetching off, because reading a batch is a collective call, and all
        # replicas must make their calls in the same order.
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        return make(self.elements, output_signature=signature).with_options(options)


def dealt(x: Any, strategy: Strategy) -> Any:
    """Return global batches as data from which Keras reads this replica's rows.

    Collective over the strategy's replicas. Arrays, and data with random access, are
    returned unchanged.
    """
    if isinstance(x, ReducibleDataset):
        if x.distribute_strategy is not strategy:
            raise ValueError(
                f"expected a data set of {strategy!r}, as the model is, found one of "
                f"{x.distribute_strategy!r}; distribute it by the model's strategy"
            )
        if isinstance(x, DistributedDataset):
            return Batches.of(x.dataset, strategy, x.stage)
        _refuse_logical(strategy)
        return DealtBatches(x, strategy, None)
    is_known = isinstance(x, (Batches, Dataset, DealtBatches))
    if is_known or x is None or columns_of(x) is not None:
        return x
    _refuse_logical(strategy)
    source = _NumpyBatches(x)
    batches = strategy.experimental_distribute_dataset(source)
    is_py_dataset = isinstance(x, keras.utils.PyDataset)
    return DealtBatches(
        batches, strategy, _length(x), source if is_py_dataset else None
    )


def _refuse_logical(strategy: Strategy) -> None:
    what = "fit and the like of an iterable or a stream"
    advice = "pass arrays, Batches or a hpcstrat.Dataset with random access"
    refuse_logical_replicas(strategy, what, advice)


class _NumpyBatches:
    """Batches of another library, converted to arrays of NumPy.

    ``order`` are the numbers of the batches of a ``PyDataset`` that has an end.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.order: list[int] | None = None

    def __iter__(self) -> Iterator[Any]:
        source, order = self.batches, self.order
        for batch in source if order is None else map(source.__getitem__, order):
            yield _plain(batch)


def _plain(batch: Any) -> Any:
    def array(leaf: Any) -> Any:
        # NumPy cannot read a torch tensor that requires gradients or is on a GPU.
        leaf = leaf.detach().cpu() if hasattr(leaf, "detach") else leaf
        return leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)

    plain = keras.tree.map_structure(array, batch)
    return tuple(plain) if isinstance(plain, list) else plain


def _length(batches: Any) -> int | None:
    """Return the number of batches, or None if it is unknown."""
    if isinstance(batches, keras.utils.PyDataset):
        count: int | None = batches.num_batches
        return count
    try:
        number = batches.cardinality() if hasattr(batches, "cardinality") else None
        found = len(batches) if number is None else int(number)
    except TypeError:
        return None
    return found if found >= 0 else None


@contextmanager
def ends_with_its_data() -> Iterator[None]:
    """Suppress Keras' warning that data of unknown length have ended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        yield
