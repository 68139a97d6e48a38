"""Data sets: chains of methods as in tf.data, with random access where it can be."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data import batch_streams, stages, streams
from hpcstrat.data.batched import Batched, shuffled_rows
from hpcstrat.data.elements import as_element, writable
from hpcstrat.data.files.rows import FileRows, files_of, matching_files
from hpcstrat.data.joined_rows import MixedRows
from hpcstrat.data.lineage import DatasetOptions, Lineage, rows_of_names
from hpcstrat.data.read_ahead import read_ahead, read_batches_ahead, read_rows
from hpcstrat.data.rows import (
    INFINITE,
    OneRow,
    Rows,
    SourceRows,
    Stage,
    in_words,
)
from hpcstrat.data.sources import Columns, open_source
from hpcstrat.data.stages import checked_size
from hpcstrat.engine.html import table
from hpcstrat.engine.options import AutoShardPolicy
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["SHARD_HINT", "Dataset", "mix"]

SHARD_HINT = -1
"""Stands for the number and the index of a shard, which distribution fills in."""

_AUTOTUNE = -1


class Dataset:
    """Examples, or batches of them, made by a chain of methods as in tf.data.

    Iterating it by itself gives its elements, as one process would train on them; each
    ``iter()`` is the next epoch. `Strategy.experimental_distribute_dataset` divides
    global batches between replicas.

    Rows of arrays, files and sequences have random access: every replica reads only
    its own rows, and an iteration goes on from any checkpoint. These methods give it
    up: ``filter``, ``interleave``, ``flat_map``, ``take_while``, ``rebatch``,
    ``unbatch``, ``from_generator``, ``ignore_errors``, sampling and choosing, and
    shuffling or mixing of batches.

    Parameters
    ----------
    source : array, nested structure of arrays, sequence, path, h5py.File or Group
        One row per example. An HDF5 file or group gives a mapping of its datasets, a
        sequence of tuples or mappings of arrays elements of that structure.
    batch_size : int, optional
        Examples in a global batch; default: single examples, to be batched by `batch`.
    shuffle : bool
        Whether each epoch has an order of its own, drawn from ``(seed, epoch)``.
    seed : int
        Key of the order.
    drop_remainder : bool
        Whether to leave out a last batch that is not full.

    Raises
    ------
    ValueError
        If the batch size is not positive, or the columns do not fit together.
    FileNotFoundError
        If there is no such file.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> dataset = hs.Dataset.range(5).map(lambda x: x * 10).batch(2)
    >>> [batch.tolist() for batch in dataset]
    [[0, 10], [20, 30], [40]]
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        # How it was made; for the library's own modules.
        self.lineage: Lineage
        if isinstance(source, Lineage):
            # A data set that a method of this class has made.
            self.lineage = source
        else:
            stage: Stage
            if isinstance(source, (str, os.PathLike)):
                stage = FileRows(files_of(source))
            else:
                stage = SourceRows(open_source(source))
            if shuffle:
                stage = stages.shuffle(stage, None, seed, True)
            if batch_size is not None:
                stage = stages.batch(stage, checked_size(batch_size), drop_remainder)
            self.lineage = Lineage(stage)
            self.lineage.seed = seed
        self._epoch = 0

    def _then(self, make: Callable[..., Stage], *others: Dataset) -> Dataset:
        """Return a data set of the stage that a function makes of the stages."""
        return Dataset(self.lineage.then(make, *(each.lineage for each in others)))

    @property
    def seed(self) -> int:
        """Key of the order of shuffled elements."""
        return self.lineage.seed

    # Sources

    @classmethod
    def from_tensor_slices(cls, tensors: Tree) -> Dataset:
        """Return the rows of arrays.

        Not collective.

        Parameters
        ----------
        tensors : array, or nested structure of arrays
            Their first dimensions are equal; lists become arrays.

        Returns
        -------
        Dataset
            One element for each row.

        Raises
        ------
        ValueError
            For scalars, and for first dimensions that differ.
        """
        return cls(Lineage(SourceRows(Columns.of_slices(as_element(tensors)))))

    @classmethod
    def from_tensors(cls, tensors: Tree) -> Dataset:
        """Return one element.

        Not collective.

        Parameters
        ----------
        tensors : array, or nested structure of arrays
            The element.

        Returns
        -------
        Dataset
            Its cardinality is 1.
        """
        return cls(Lineage(OneRow(as_element(tensors))))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Any],
        *,
        output_signature: Tree = None,
        args: tuple[Any, ...] = (),
    ) -> Dataset:
        """Return the elements of an iterable that a function makes for each epoch.

        Not collective. It must give the same on every worker, unless the data set is
        sharded.

        Parameters
        ----------
        generator : callable
            Returns an iterable of elements.
        output_signature : nested structure of ArraySpec, optional
            The spec that elements must have; default: no check.
        args : tuple
            Arguments of the function.

        Returns
        -------
        Dataset
            Its cardinality is unknown.

        Raises
        ------
        TypeError
            If it cannot be called; when iterated, for elements of another signature.
        """
        return cls(Lineage(streams.generated(generator, args, output_signature)))

    @classmethod
    def from_files(
        cls,
        paths: Any,
        columns: str | Sequence[str] | None = None,
        *,
        dimension: str | None = None,
        decode: bool = True,
    ) -> Dataset:
        """Return the rows of HDF5, NetCDF-4, NumPy, Parquet files or Zarr stores.

        Not collective. Rows have random access, over all files. All files must have
        the same columns; numbers of rows may differ.

        The columns of NetCDF-4 files are the fields along one dimension, without
        coordinates and bounds, decoded by CF 1.11 (sections 2.5.1 and 8.1).

        Parameters
        ----------
        paths : str, path, or sequence of them
            Also patterns, such as ``data/*.h5``; a folder means its ``*.parquet``.
        columns : str or sequence of str, optional
            Names, or patterns, such as ``fields/*``; default: all. A single name gives
            bare arrays, else elements are mappings, nested as groups are.
        dimension : str, optional
            Dimension of rows in NetCDF-4; default: the unlimited or most common one.
        decode : bool
            Whether to apply fill values, scale and offset of NetCDF-4.

        Returns
        -------
        Dataset
            One element for each row.

        Raises
        ------
        FileNotFoundError
            If nothing matches.
        ValueError
            If a file cannot be read, or its columns do not fit together, or to those of
            the other files; when iterated, if a file has changed.
        ImportError
            If ``zarr`` or ``pyarrow`` is needed, and not installed.
        """
        make = functools.partial(
            FileRows, columns=columns, dimension=dimension, decode=decode
        )
        return cls(Lineage.of_files(files_of(paths), make))

    @classmethod
    def range(cls, *args: int) -> Dataset:
        """Return integers, int64.

        Not collective.

        Parameters
        ----------
        *args : int
            Arguments of Python's ``range``.

        Returns
        -------
        Dataset
            Scalars.
        """
        return cls(Lineage(stages.range_of(*args)))

    @classmethod
    def list_files(
        cls, file_pattern: Any, shuffle: bool = True, seed: int | None = None
    ) -> Dataset:
        """Return the names of files.

        Not collective.

        Parameters
        ----------
        file_pattern : str or sequence of str
            Patterns may have ``*``, ``?`` and ``[]``.
        shuffle : bool
            Whether each epoch has an order of its own; else they are sorted.
        seed : int, optional
            Key of the order; default 0.

        Returns
        -------
        Dataset
            Texts; policy FILE divides them between workers.

        Raises
        ------
        FileNotFoundError
            If no file matches.
        """
        files = matching_files(file_pattern)
        dataset = cls(Lineage.of_files(files, rows_of_names, opens_files=False))
        return dataset.shuffle(len(files), seed) if shuffle else dataset

    @classmethod
    def from_text_files(cls, filenames: Any) -> Dataset:
        """Return the lines of text files, as tf.data.TextLineDataset does.

        Not collective.

        Parameters
        ----------
        filenames : str, path, or sequence of them
            Read as UTF-8, one after another.

        Returns
        -------
        Dataset
            Texts without ends of lines; policy FILE divides the files.
        """
        files = [os.fspath(name) for name in np.atleast_1d(filenames)]
        return cls(Lineage.of_files(files, streams.text_lines))

    # Methods that keep random access

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        *,
        deterministic: bool | None = None,
        seed: int | None = None,
    ) -> Dataset:
        """Return the results of a function for each element.

        Not collective.

        Parameters
        ----------
        map_func : callable
            Takes an element, or the parts of one that is a tuple; after `batch`, a
            whole global batch, of which it must keep the number of rows.
        num_parallel_calls, deterministic : optional
            Ignored: the order is kept, and threads that read ahead call the function.
        seed : int, optional
            Gives the function an argument ``rng``, a `numpy.random.Generator` that the
            seed, the epoch and the element's number determine.

        Returns
        -------
        Dataset
            It has the same cardinality.
        """
        return self._then(lambda s: stages.map_elements(s, map_func, seed))

    def shuffle(
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        *,
        blocks: int | None = None,
        window: int = 16,
    ) -> Dataset:
        """Return the elements in random order.

        Not collective. The order is computed from the seed, the epoch and the place,
        and takes no memory that grows with the number of rows.

        Parameters
        ----------
        buffer_size : int, optional
            As in tf.data: element v comes at place ``v - (buffer_size - 1)`` at the
            earliest; default: all elements.
        seed : int, optional
            Key of the order; default 0, as all ranks must have the same.
        reshuffle_each_iteration : bool
            Whether each epoch has an order of its own.
        blocks : int, optional
            Instead, permute blocks of so many rows, which files read in one go, and mix
            the rows of ``window`` blocks: neighbors in a file often share a batch.
        window : int
            Number of blocks that are mixed.

        Returns
        -------
        Dataset
            It has the same cardinality.

        Raises
        ------
        ValueError
            For sizes below 1, and for a data set without an end and no buffer size.
        """
        seed, again = int(seed or 0), bool(reshuffle_each_iteration)
        size = None if buffer_size is None else checked_size(buffer_size)
        if blocks is None:
            made = self._then(lambda s: stages.shuffle(s, size, seed, again))
        else:
            block, many = checked_size(blocks), checked_size(window)
            made = self._then(
                lambda s: stages.shuffle_blocks(s, block, many, seed, again)
            )
        made.lineage.seed = seed
        return made

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return successive elements, stacked.

        Not collective.

        Parameters
        ----------
        batch_size : int
            Elements in a global batch.
        drop_remainder : bool
            Whether to leave out a last batch that is not full.
        num_parallel_calls, deterministic : optional
            Ignored.

        Returns
        -------
        Dataset
            Arrays with one dimension more.

        Raises
        ------
        ValueError
            For a size below 1; when iterated, for elements of different shapes.
        """
        size = checked_size(batch_size)
        return self._then(lambda s: stages.batch(s, size, drop_remainder))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Tree = None,
        padding_values: Tree = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Return successive elements, filled up at their ends to one shape and stacked.

        Not collective.

        Parameters
        ----------
        batch_size : int
            Elements in a global batch.
        padded_shapes : nested structure of shapes, optional
            None or -1 in one: the longest of the batch, as is the default.
        padding_values : nested structure of scalars, optional
            Default: 0, or the empty text.
        drop_remainder : bool
            Whether to leave out a last batch that is not full.

        Returns
        -------
        Dataset
            Arrays with one dimension more.

        Raises
        ------
        ValueError
            For a size below 1; when iterated, for arrays longer than their shape.
        """
        size = checked_size(batch_size)
        return self._then(
            lambda s: stages.padded_batch(
                s, size, drop_remainder, padded_shapes, padding_values
            )
        )

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the elements several times.

        Not collective. Each time is an epoch of its own for `shuffle`.

        Parameters
        ----------
        count : int, optional
            Number of times; default, and -1: without an end.

        Returns
        -------
        Dataset
            It has ``count`` times the cardinality.
        """
        times = -1 if count is None else max(int(count), -1)
        return self._then(lambda s: stages.repeat(s, times))

    def take(self, count: int) -> Dataset:
        """Return the first elements.

        Not collective.

        Parameters
        ----------
        count : int
            Number of elements; -1: all.

        Returns
        -------
        Dataset
            At most so many elements.
        """
        return self._then(lambda s: stages.take(s, int(count)))

    def skip(self, count: int) -> Dataset:
        """Return all but the first elements.

        Not collective.

        Parameters
        ----------
        count : int
            Number of elements to leave out; -1: all.

        Returns
        -------
        Dataset
            The others.
        """
        return self._then(lambda s: stages.skip(s, int(count)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return every ``num_shards``-th element.

        Not collective.

        Parameters
        ----------
        num_shards : int
            Number of parts; `SHARD_HINT` here, and for the index: one for each worker,
            with policy HINT.
        index : int
            Number of the part, from 0.

        Returns
        -------
        Dataset
            The part.

        Raises
        ------
        ValueError
            For an index that is no part; when iterated, for a hint without policy HINT.
        """
        if num_shards == SHARD_HINT and index == SHARD_HINT:
            return Dataset(self.lineage.hint())
        return Dataset(self.lineage.shard(num_shards, index))

    def cache(self, filename: str = "") -> Dataset:
        """Return the elements of the first epoch, kept in memory as they are read.

        Not collective. A shuffle before it is so frozen; shuffle after it.

        Parameters
        ----------
        filename : str
            Must be empty: files of a cache are not supported.

        Returns
        -------
        Dataset
            The same elements in each epoch.

        Raises
        ------
        ValueError
            For a file.
        """
        if filename:
            raise ValueError(
                f"expected a cache in memory, found the file {filename!r}; write the "
                "elements to HDF5 and read that"
            )
        return self._then(stages.cache)

    def prefetch(self, buffer_size: int) -> Dataset:
        """Return the same elements, read ahead by threads.

        Not collective.

        Parameters
        ----------
        buffer_size : int
            Elements read ahead, with random access batches; -1 (AUTOTUNE): two; 0:
            none. Rows of arrays on GPUs are not read ahead.

        Returns
        -------
        Dataset
            It has the same cardinality.
        """
        ahead = 2 if buffer_size == _AUTOTUNE else int(buffer_size)
        if ahead < 0:
            raise ValueError(
                f"expected buffer_size >= -1, found {buffer_size}; change it"
            )
        made = self._then(lambda s: read_ahead(s, ahead))
        made.lineage.ahead = max(ahead, self.ahead)
        return made

    def enumerate(self, start: int = 0) -> Dataset:
        """Return pairs of a number, int64, and an element.

        Not collective.

        Parameters
        ----------
        start : int
            The first number.

        Returns
        -------
        Dataset
            It has the same cardinality.
        """
        return self._then(lambda s: stages.enumerate_elements(s, int(start)))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return these elements, and then those of another data set.

        Not collective.

        Parameters
        ----------
        dataset : Dataset
            The other one.

        Returns
        -------
        Dataset
            The elements of both.

        Raises
        ------
        TypeError
            Where elements differ in structure or dtype.
        """
        return self._then(stages.concatenate, dataset)

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Return elements of several data sets side by side.

        Not collective.

        Parameters
        ----------
        *datasets : Dataset, or one nested structure of them
            As many elements as the shortest has.

        Returns
        -------
        Dataset
            Its elements have that structure.
        """
        given: Any = datasets[0] if len(datasets) == 1 else datasets
        (first, *others), structure = flatten(given)
        made: Dataset = first._then(
            lambda *parts: stages.zip_elements(unflatten(structure, list(parts))),
            *others,
        )
        return made

    # Methods that give a stream

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the elements for which a function is true.

        Not collective. Each worker then goes through all elements.

        Parameters
        ----------
        predicate : callable
            Takes an element, or the parts of one that is a tuple.

        Returns
        -------
        Dataset
            Its cardinality is unknown.
        """
        return self._then(lambda s: streams.selected(s, predicate))

    def take_while(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the elements up to the first for which a function is false.

        Not collective.

        Parameters
        ----------
        predicate : callable
            Takes an element, or the parts of one that is a tuple.

        Returns
        -------
        Dataset
            Its cardinality is unknown.
        """
        return self._then(lambda s: streams.taken_while(s, predicate))

    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Return blocks of elements of several data sets in turn, in tf.data's order.

        Not collective.

        Parameters
        ----------
        map_func : callable
            Makes a data set of each element.
        cycle_length : int, optional
            Number of data sets that are open at once; default 2.
        block_length : int
            Elements taken from one before the next one's turn.
        num_parallel_calls, deterministic : optional
            Ignored: the order is that of one thread.

        Returns
        -------
        Dataset
            Its cardinality is unknown.

        Raises
        ------
        ValueError
            For lengths below 1.
        """
        cycle = 2 if cycle_length in (None, _AUTOTUNE) else checked_size(cycle_length)
        block = checked_size(block_length)
        made = self._then(
            lambda s: streams.interleaved(s, map_func, _stage_of, cycle, block)
        )
        made.lineage.opens_files |= self.lineage.opens_names(
            lambda name: map_func(name).lineage
        )
        return made

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """Return the elements of the data sets that a function makes, one by one.

        Not collective.

        Parameters
        ----------
        map_func : callable
            Makes a data set of each element.

        Returns
        -------
        Dataset
            Its cardinality is unknown.
        """
        return self.interleave(map_func, 1, 1)

    def unbatch(self) -> Dataset:
        """Return the rows of all batches.

        Not collective.

        Returns
        -------
        Dataset
            Its elements have one dimension less.
        """
        return self._then(batch_streams.unbatched)

    def rebatch(
        self, batch_size: int | Sequence[int], drop_remainder: bool = False
    ) -> Dataset:
        """Return all rows in batches of other sizes.

        Not collective.

        Parameters
        ----------
        batch_size : int or sequence of int
            Several come in turn.
        drop_remainder : bool
            Whether to leave out a last batch that is not full.

        Returns
        -------
        Dataset
            Its cardinality is unknown.

        Raises
        ------
        ValueError
            For sizes below 1.
        """
        sizes = stages.sizes_of_batches(batch_size)
        return self._then(lambda s: batch_streams.rebatched(s, sizes, drop_remainder))

    def pack(self, length: int, padding_value: Any = 0) -> Dataset:
        """Return sequences of any lengths packed into rows of one length, in order.

        Not collective. A row is filled with whole sequences until the next one does not
        fit.

        Parameters
        ----------
        length : int
            First dimension of the arrays of a row.
        padding_value : scalar
            Value that fills the end of a row.

        Returns
        -------
        Dataset
            Its elements are mappings: ``values`` in the elements' structure,
            ``segments``, int32 (1 for the first sequence of the row and so on, 0 for
            the padding), and ``positions``, int32, in each sequence.

        Raises
        ------
        ValueError
            For a length below 1; when iterated, for a sequence that is longer.
        """
        size = checked_size(length)
        return self._then(lambda s: batch_streams.packed(s, size, padding_value))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., int],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        *,
        padded_shapes: Tree = None,
        padding_values: Tree = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Return padded batches of elements of similar length, in tf.data's order.

        Not collective.

        Parameters
        ----------
        element_length_func : callable
            Takes an element, or the parts of one that is a tuple; returns its length.
        bucket_boundaries : sequence of int
            Increasing; a bucket has the lengths from one boundary to below the next.
        bucket_batch_sizes : sequence of int
            One more than boundaries.
        padded_shapes, padding_values : optional
            See `padded_batch`.
        pad_to_bucket_boundary : bool
            Whether to pad to one below the bucket's upper boundary.
        no_padding : bool
            Whether the elements of a bucket have one shape already.
        drop_remainder : bool
            Whether to leave out batches that are not full at the end.

        Returns
        -------
        Dataset
            Its cardinality is unknown.

        Raises
        ------
        ValueError
            For boundaries that do not increase, and another number of sizes.
        """
        sizes = [checked_size(size) for size in bucket_batch_sizes]
        return self._then(
            lambda s: batch_streams.bucketed(
                s,
                element_length_func,
                list(bucket_boundaries),
                sizes,
                shapes=padded_shapes,
                values=padding_values,
                to_boundary=pad_to_bucket_boundary,
                no_padding=no_padding,
                drop_remainder=drop_remainder,
            )
        )

    def ignore_errors(self, log_warning: bool = False) -> Dataset:
        """Return the elements whose making does not raise.

        Not collective.

        Parameters
        ----------
        log_warning : bool
            Whether to log each error.

        Returns
        -------
        Dataset
            Its cardinality is unknown.
        """
        return self._then(lambda s: streams.kept_errors_out(s, log_warning))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
    ) -> Dataset:
        """Return elements of several data sets, each time of the one that is named.

        Not collective.

        Parameters
        ----------
        datasets : sequence of Dataset
            Their elements have one structure.
        choice_dataset : Dataset
            Its elements are the numbers of data sets.
        stop_on_empty_dataset : bool
            Whether to end with the first that ends; else it is passed over.

        Returns
        -------
        Dataset
            Its cardinality is unknown.
        """
        return choice_dataset._then(
            lambda c, *s: streams.chosen(s, c, stop_on_empty_dataset), *datasets
        )

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
    ) -> Dataset:
        """Return elements of several data sets, drawn by weights.

        Not collective.

        Parameters
        ----------
        datasets : sequence of Dataset
            Their elements have one structure.
        weights : sequence of float, optional
            Weight of each; default: equal.
        seed : int, optional
            Key of the draws; default 0.
        stop_on_empty_dataset : bool
            Whether to end with the first that ends; else the others go on.

        Returns
        -------
        Dataset
            Its cardinality is unknown.

        Raises
        ------
        ValueError
            For weights that are negative, or not one for each.
        """
        key = 0 if seed is None else int(seed)
        return datasets[0]._then(
            lambda *s: streams.sampled(s, weights, key, stop_on_empty_dataset),
            *datasets[1:],
        )

    # Other methods

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return the result of a function of the data set.

        Not collective.

        Parameters
        ----------
        transformation_func : callable
            Takes the data set, returns one.

        Returns
        -------
        Dataset
            The function's result.
        """
        return transformation_func(self)

    def with_options(self, options: Any) -> Dataset:
        """Return the same elements with options.

        Not collective.

        Parameters
        ----------
        options : DatasetOptions
            Or any object with ``auto_shard_policy``, by itself or in its
            ``experimental_distribute``.

        Returns
        -------
        Dataset
            The same elements.
        """
        return Dataset(self.lineage.with_options(options))

    def options(self) -> DatasetOptions:
        """Return the options.

        Not collective.

        Returns
        -------
        DatasetOptions
            Options of `with_options`, or the defaults.
        """
        return self.lineage.options

    def cardinality(self) -> int:
        """Return the number of elements.

        Not collective.

        Returns
        -------
        int
            -1 where there is no end, -2 where they must be gone through to be counted.
        """
        return self.stage.cardinality

    @property
    def element_spec(self) -> Tree:
        """Shapes and dtypes of the arrays of an element, as ArraySpec.

        Functions of `map` are called with the first elements to find out.
        """
        return self.lineage.spec()

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        """Combine all elements by a function.

        Not collective.

        Parameters
        ----------
        initial_state : object
            The first state.
        reduce_func : callable
            Takes the state and an element, returns the next state.

        Returns
        -------
        object
            The last state.
        """
        return functools.reduce(reduce_func, self, initial_state)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0; it can be set."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = int(value)

    def as_numpy_iterator(self) -> Iterator[Tree]:
        """Return ``iter`` of the data set: elements are arrays anyway.

        Not collective.

        Returns
        -------
        iterator of tree
            The next epoch.
        """
        return iter(self)

    def __iter__(self) -> Iterator[Tree]:
        """Give the elements of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        stage = self.stage
        if self.ahead and isinstance(stage, Batched) and not stage.is_on_gpu():

            def read(start: int) -> Tree:
                return read_rows(stage, epoch, start, 0, stage.stop(start) - start)

            return map(writable, read_batches_ahead(stage, read, self.ahead))
        return map(writable, stage.iterate(epoch))

    def __len__(self) -> int:
        """Return the number of elements; raises TypeError where it is not known."""
        if self.stage.cardinality < 0:
            what = "no end" if self.stage.cardinality == INFINITE else "unknown length"
            raise TypeError(
                f"expected a data set whose elements are counted, found one of {what}; "
                "use take(), or ask cardinality()"
            )
        return self.stage.cardinality

    def __bool__(self) -> bool:
        """Return True, also for a data set without elements."""
        return True

    def __repr__(self) -> str:
        """Describe the chain, for people and for the comparison between ranks."""
        return f"<Dataset of {self.stage.describe()}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks; no function of the program is called."""
        rows = {
            "elements": in_words(self.cardinality()),
            "examples": in_words(self.num_rows),
            "global batch": self.batch_size or "unknown",
            "made of": self.stage.describe(),
        }
        return table("Dataset", rows)

    def describe(self) -> str:
        """Describe the chain, on which ranks must agree.

        Not collective.

        Returns
        -------
        str
            Sizes, orders and types, through the whole chain.
        """
        return f"a data set of {self.stage.describe()}"

    # Methods that distribution calls

    @property
    def stage(self) -> Stage:
        """The last stage of the chain; for the library's own modules."""
        return self.lineage.stage

    @property
    def ahead(self) -> int:
        """Batches to read ahead; for the library's own modules."""
        return self.lineage.ahead

    @property
    def num_rows(self) -> int:
        """Number of examples of an epoch: -1 without an end, -2 if it is not known."""
        return self.stage.num_rows

    @property
    def batch_size(self) -> int | None:
        """Examples in a global batch; None where it is not known."""
        return self.stage.batch_size

    @property
    def drop_remainder(self) -> bool:
        """Whether a last batch that is not full is left out."""
        return self.stage.drop_remainder

    def rows(self, epoch: int, start: int, stop: int) -> Array | slice:
        """Return the rows at places of an epoch; for the library's own modules."""
        shuffled = shuffled_rows(self.stage)
        places = slice(start, stop)
        return places if shuffled is None else shuffled.rows(places, epoch)

    def order(self, epoch: int) -> Array | None:
        """Return the order of an epoch's rows.

        Not collective; the same on every rank.

        Parameters
        ----------
        epoch : int
            From 0.

        Returns
        -------
        ndarray of int64 of shape (num_rows,), or None
            None without shuffling.
        """
        shuffled = shuffled_rows(self.stage)
        if shuffled is None:
            return None
        return shuffled.rows(slice(0, shuffled.cardinality), epoch)

    def keep_old_order(self, epoch: int) -> None:
        """Give an epoch order version 1; for the library's own modules."""
        shuffled = shuffled_rows(self.stage)
        if shuffled is not None:
            shuffled.keep_exact(epoch, self.seed)

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The rule that divides the data set between workers."""
        return AutoShardPolicy.parse(self.options().auto_shard_policy)

    @property
    def files(self) -> list[str] | None:
        """Names of the files that a stream reads; None if it reads none."""
        return self.lineage.files()

    def shard_files(self, num_shards: int, index: int) -> Dataset:
        """Return the chain over every ``num_shards``-th file.

        Not collective.

        Parameters
        ----------
        num_shards : int
            Number of parts.
        index : int
            Number of the part, from 0.

        Returns
        -------
        Dataset
            The part.

        Raises
        ------
        ValueError
            If the chain reads no files.
        """
        return Dataset(self.lineage.shard_files(num_shards, index))

    def shard_by_hint(self, num_shards: int, index: int) -> Dataset:
        """Replace `SHARD_HINT`, if it is there; for the library's own modules."""
        found = self.lineage.shard_by_hint(num_shards, index)
        return self if found is self.lineage else Dataset(found)

    def auto_shard(self, num_workers: int, index: int) -> Dataset:
        """Return a worker's part, by the auto-shard policy.

        Not collective. By DATA, and by AUTO without files, each worker has every
        ``num_workers``-th element. (A strategy cuts each global batch instead.)

        Parameters
        ----------
        num_workers : int
            Number of workers.
        index : int
            Number of the part, from 0.

        Returns
        -------
        Dataset
            The part.

        Raises
        ------
        ValueError
            For policy FILE without files.
        """
        ways = {
            AutoShardPolicy.FILE: self.shard_files,
            AutoShardPolicy.DATA: self.shard,
            AutoShardPolicy.HINT: self.shard_by_hint,
        }
        way = ways.get(self.lineage.policy())
        return self if way is None else way(num_workers, index)


def _stage_of(value: Any) -> Stage:
    if not isinstance(value, Dataset):
        raise TypeError(
            "expected a Dataset from the function of interleave or flat_map, found "
            f"{type(value).__name__}; return one"
        )
    return value.stage


def mix(
    datasets: Sequence[Dataset],
    weights: Sequence[float] | None = None,
    *,
    seed: int = 0,
) -> Dataset:
    """Return the elements of several data sets, mixed by weights, without an end.

    Not collective. It keeps random access, unlike `Dataset.sample_from_datasets`. Each
    row of a data set comes exactly once in each of that data set's epochs.

    Parameters
    ----------
    datasets : sequence of Dataset
        Their elements have one structure, random access, and are not yet batches.
    weights : sequence of float, optional
        Shares of the elements, to 1/4096; default: equal.
    seed : int
        Key of the order in which they alternate.

    Returns
    -------
    Dataset
        It has no end.

    Raises
    ------
    ValueError
        For a data set without random access or elements, and for weights that are not
        positive, one for each.
    TypeError
        Where elements differ in structure or dtype.
    """
    for dataset in datasets:
        if not isinstance(dataset.stage, Rows) or not dataset.stage.cardinality:
            raise ValueError(
                "expected data sets of rows that can be read at random, found "
                f"{dataset!r}; mix before batch() and filter(), or use "
                "sample_from_datasets"
            )
    first, *others = datasets
    made = first._then(lambda *parents: MixedRows(parents, weights, seed), *others)
    made.lineage.seed = seed
    return made
