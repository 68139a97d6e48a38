"""Data sets: chains of methods as in tf.data, with random access if possible."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.data import batch_streams, stages, streams
from hpcstrat.data.batched import Batch, Batched, shuffled_rows
from hpcstrat.data.costs import costs_of_batches
from hpcstrat.data.elements import as_element, call_program, writable
from hpcstrat.data.files.rows import FileRows, files_of, matching_files
from hpcstrat.data.joined_rows import MixedRows
from hpcstrat.data.lineage import DatasetOptions, Lineage, rows_of_names, stage_of
from hpcstrat.data.read_ahead import read_ahead, read_batches_ahead
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
"""Placeholder in `Dataset.shard` for values that the strategy fills in."""

_AUTOTUNE = -1


class Dataset:
    """Examples, or batches of examples, made by a chain of methods as in tf.data.

    A loop over the data set yields all elements, in the order in which one process
    would train on them; each ``iter()`` starts the next epoch.
    `Strategy.experimental_distribute_dataset` divides global batches between replicas.

    Rows of arrays, files and sequences have random access: every replica reads only its
    own rows, and an iteration can continue from any checkpoint. These methods give up
    random access: ``filter``, ``interleave``, ``flat_map``, ``take_while``, ``pack``,
    ``rebatch``, ``unbatch``, ``bucket_by_sequence_length``, ``from_generator``,
    ``from_text_files``, ``ignore_errors``, sampling and choosing; and after ``batch``
    also ``shuffle``, ``shard``, ``zip``, ``enumerate``, ``concatenate``, ``batch``, and
    ``map`` with a seed.

    Parameters
    ----------
    source : array, nested structure of arrays, sequence, path, h5py.File or Group
        One row per example. An HDF5 file or group becomes a mapping of its datasets;
        the items of a sequence keep their structure of tuples or mappings.
    batch_size : int, optional
        Number of examples in a global batch; default: no batches, until `batch` is
        called.
    shuffle : bool
        Whether to shuffle each epoch in its own order, which ``(seed, epoch)``
        determines.
    seed : int
        Seed of the order.
    drop_remainder : bool
        Whether to leave out a last batch that is not full.

    Raises
    ------
    ValueError
        If the batch size is not positive, or if columns differ in their number of rows.
    FileNotFoundError
        If the file does not exist.

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
        # The steps that made this data set; for the library's own modules.
        self.lineage: Lineage
        if isinstance(source, Lineage):
            # The methods of this class pass a lineage instead of a source.
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
        """Apply ``make`` to the data sets' last stages, and return a new data set."""
        return Dataset(self.lineage.then(make, *(each.lineage for each in others)))

    @property
    def seed(self) -> int:
        """Seed of the order of shuffled elements."""
        return self.lineage.seed

    # Sources

    @classmethod
    def from_tensor_slices(cls, tensors: Tree) -> Dataset:
        """Return a data set whose elements are the rows of arrays.

        Not collective.

        Parameters
        ----------
        tensors : array, or nested structure of arrays
            Arrays with equal first dimensions; lists become arrays.

        Returns
        -------
        Dataset
            One element for each row.

        Raises
        ------
        ValueError
            If an array is a scalar, or if first dimensions differ.
        """
        return cls(Lineage(SourceRows(Columns.of_slices(as_element(tensors)))))

    @classmethod
    def from_tensors(cls, tensors: Tree) -> Dataset:
        """Return a data set of one element.

        Not collective.

        Parameters
        ----------
        tensors : array, or nested structure of arrays
            The element.

        Returns
        -------
        Dataset
            A data set of cardinality 1.
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
        """Call a function in each epoch, and return the elements of its iterable.

        Not collective. The iterable must have the same elements on every worker, unless
        the data set is sharded.

        Parameters
        ----------
        generator : callable
            Returns an iterable of elements.
        output_signature : nested structure of ArraySpec, optional
            Shapes and dtypes that elements must have; default: no check. Without it,
            the function is called once more where shapes and dtypes are needed, as in
            `element_spec` and `concatenate`.
        args : tuple
            Arguments of the function.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.

        Raises
        ------
        TypeError
            If ``generator`` is not callable; during iteration, if an element does not
            match ``output_signature``.
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

        Not collective. Rows have random access across all files. All files must have
        the same columns, but may have different numbers of rows.

        The columns of NetCDF-4 files are the variables along one dimension, without
        coordinates and bounds, decoded as in CF 1.11 (sections 2.5.1 and 8.1).

        Parameters
        ----------
        paths : str, path, or sequence of them
            Paths or patterns, such as ``data/*.h5``; a folder stands for its
            ``*.parquet`` files.
        columns : str or sequence of str, optional
            Names, or patterns, such as ``fields/*``; default: all. With one name,
            elements are arrays; with several, mappings that are nested like groups.
            Parquet has no groups, so that a name with a slash is one key.
        dimension : str, optional
            NetCDF-4 dimension along which rows lie; default: the unlimited dimension,
            or else the first dimension of most variables.
        decode : bool
            Whether to apply fill values, scale and offset of NetCDF-4.

        Returns
        -------
        Dataset
            One element for each row.

        Raises
        ------
        FileNotFoundError
            If no file matches.
        ValueError
            If a file cannot be read, if a column has values that NumPy cannot store,
            or if columns do not match within a file or between files; during iteration,
            if a file has changed, or if a Parquet column has nulls, or lists of
            different lengths.
        ImportError
            If ``zarr`` or ``pyarrow`` is needed but not installed.
        """
        make = functools.partial(
            FileRows, columns=columns, dimension=dimension, decode=decode
        )
        return cls(Lineage.of_files(files_of(paths), make))

    @classmethod
    def range(cls, *args: int) -> Dataset:
        """Return a data set of integers (int64), as Python's ``range`` counts.

        Not collective.

        Parameters
        ----------
        *args : int
            Arguments of Python's ``range``.

        Returns
        -------
        Dataset
            One scalar for each integer.
        """
        return cls(Lineage(stages.range_of(*args)))

    @classmethod
    def list_files(
        cls, file_pattern: Any, shuffle: bool = True, seed: int | None = None
    ) -> Dataset:
        """Return a data set of the names of matching files.

        Not collective.

        Parameters
        ----------
        file_pattern : str or sequence of str
            Paths, or patterns with ``*``, ``?`` and ``[]``.
        shuffle : bool
            Whether each epoch has its own random order; if not, names are sorted.
        seed : int, optional
            Seed of the order; default 0.

        Returns
        -------
        Dataset
            One string for each file; auto-shard policy FILE divides the files between
            workers.

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
            Files to read as UTF-8, one after another.

        Returns
        -------
        Dataset
            One string for each line, without its line end; auto-shard policy FILE
            divides the files between workers.
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
        """Call a function with each element, and return its results.

        Not collective.

        Parameters
        ----------
        map_func : callable
            Function of an element (items of a tuple become arguments). After `batch`,
            the argument is a whole global batch, and the result must have as many rows.
        num_parallel_calls, deterministic : optional
            Ignored: results stay in order, and threads that read ahead call the
            function.
        seed : int, optional
            If given, the function gets an argument ``rng``, a `numpy.random.Generator`
            that the seed, the epoch and the element's number determine.

        Returns
        -------
        Dataset
            A data set of the same cardinality.
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

        Not collective. For rows with random access, the order is computed from seed,
        epoch and place, so that memory use does not grow with the number of rows.

        Parameters
        ----------
        buffer_size : int, optional
            Size of the shuffle buffer, as in tf.data: element v moves no further
            forward than to place ``v - (buffer_size - 1)``; default: all elements.
        seed : int, optional
            Seed of the order; default 0, because all ranks must use the same seed.
        reshuffle_each_iteration : bool
            Whether each epoch has its own order.
        blocks : int, optional
            Instead, permute blocks of this many rows, then shuffle the rows within each
            group of ``window`` blocks. Whole blocks are read faster from files, but
            adjacent rows of a file often get into the same batch.
        window : int
            Number of blocks whose rows are shuffled together.

        Returns
        -------
        Dataset
            A data set of the same cardinality.

        Raises
        ------
        ValueError
            If a size is below 1, if a data set without an end has no ``buffer_size``,
            or if ``blocks`` is given without random access.
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
        batch_size: int | None = None,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        *,
        costs: Any = None,
        max_cost: float | None = None,
        equal_rows: bool = False,
    ) -> Dataset:
        """Stack successive elements into global batches.

        Not collective. With ``costs``, replicas divide each global batch so that the
        largest sum of costs is small: each row, in decreasing order of cost, goes to
        the replica with the smallest sum so far (Graham 1969, doi:10.1137/0117039).
        Replicas may then have different numbers of rows. Which rows are in a global
        batch, and the order of batches, does not depend on the division.

        Parameters
        ----------
        batch_size : int, optional
            Number of elements in a global batch; may be omitted with ``max_cost``.
        drop_remainder : bool
            Whether to leave out a last batch that is not full.
        num_parallel_calls, deterministic : optional
            Ignored.
        costs : array_like, str, callable or MeasuredCosts, optional
            Costs >= 0 of the rows, in any unit: an array of shape (num_rows,), for the
            rows in the order that they have before `shuffle` and `repeat`; the name of
            a column; a function of an element (items of a tuple become arguments),
            which is called once for each row; or costs that are measured. When the data
            set is distributed, the ranks compute the costs of a column or a function
            together, each for a part of the rows.
        max_cost : float, optional
            Greatest sum of costs of a global batch: a batch ends before the row that
            would exceed it. The number of batches is not known before an iteration.
        equal_rows : bool
            Whether replicas get equal numbers of rows, up to one, for programs that
            need it, at the price of a slightly larger difference in costs.

        Returns
        -------
        Dataset
            Batches, whose arrays have one more dimension.

        Raises
        ------
        ValueError
            If the size is below 1, or neither a size nor ``max_cost`` is given; if
            ``costs`` are given for a stream, or for rows without an end; when the data
            set is distributed or iterated, if a cost is negative, not finite or above
            ``max_cost``, or if there is not one cost for each row; during iteration, if
            elements have different shapes.
        """
        size = None if batch_size is None else checked_size(batch_size)
        rule = costs_of_batches(
            self.stage,
            costs,
            max_cost=max_cost,
            equal_rows=equal_rows,
            batch_size=size,
            drop_remainder=drop_remainder,
        )
        return self._then(lambda s: stages.batch(s, size, drop_remainder, rule))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Tree = None,
        padding_values: Tree = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Pad successive elements at their ends to one shape, and stack them.

        Not collective.

        Parameters
        ----------
        batch_size : int
            Number of elements in a global batch.
        padded_shapes : nested structure of shapes, optional
            Shapes to pad to. None or -1 in a shape means the greatest length in the
            batch, which is the default for all dimensions.
        padding_values : nested structure of scalars, optional
            Values to pad with; default: 0, or the empty string.
        drop_remainder : bool
            Whether to leave out a last batch that is not full.

        Returns
        -------
        Dataset
            Batches, whose arrays have one more dimension.

        Raises
        ------
        ValueError
            If the size is below 1; during iteration, if an array is longer than its
            shape.
        """
        size = checked_size(batch_size)
        return self._then(
            lambda s: stages.padded_batch(
                s, size, drop_remainder, padded_shapes, padding_values
            )
        )

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the elements ``count`` times.

        Not collective. Each repetition is a new epoch, in which `shuffle` has another
        order.

        Parameters
        ----------
        count : int, optional
            Number of repetitions; default and -1: repeat without an end.

        Returns
        -------
        Dataset
            A data set of ``count`` times the cardinality.
        """
        times = -1 if count is None else max(int(count), -1)
        return self._then(lambda s: stages.repeat(s, times))

    def take(self, count: int) -> Dataset:
        """Return a data set of the first ``count`` elements.

        Not collective.

        Parameters
        ----------
        count : int
            Number of elements; -1: all.

        Returns
        -------
        Dataset
            At most ``count`` elements.
        """
        return self._then(lambda s: stages.take(s, int(count)))

    def skip(self, count: int) -> Dataset:
        """Return a data set without the first ``count`` elements.

        Not collective.

        Parameters
        ----------
        count : int
            Number of elements to leave out; -1: all.

        Returns
        -------
        Dataset
            The remaining elements.
        """
        return self._then(lambda s: stages.skip(s, int(count)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return every ``num_shards``-th element, beginning with element ``index``.

        Not collective.

        Parameters
        ----------
        num_shards : int
            Number of parts. With `SHARD_HINT` for this and for ``index``, each worker
            gets one part (auto-shard policy HINT).
        index : int
            Number of the part, from 0.

        Returns
        -------
        Dataset
            The elements of this part.

        Raises
        ------
        ValueError
            If no part has the number ``index``; during iteration, if `SHARD_HINT` is
            used without policy HINT.
        """
        if num_shards == SHARD_HINT and index == SHARD_HINT:
            return Dataset(self.lineage.hint())
        return Dataset(self.lineage.shard(num_shards, index))

    def split(
        self, axis: int | Mapping[str | int, int], *, along: str | None = None
    ) -> Dataset:
        """Give each rank of a replica its slab of each row, if replicas have several.

        Not collective. The data set must be distributed by a strategy whose replicas
        consist of several ranks: all ranks of a replica then get the same rows, and the
        rank at position p has the part ``strategy.inside.part(n)`` of ``n`` values
        along the axis, which may be empty. Other strategies, and a loop over the data
        set itself, get whole rows. Methods after `split`, such as `map`, get slabs.

        Of files, a rank reads only its slab, if ``axis`` is the first dimension of rows
        that are contiguous, or if chunks are split along the axis; of other rows, and
        of results of functions, whole rows are made and then cut.

        Parameters
        ----------
        axis : int or mapping of str to int
            Dimension of a row, from 0 or, if negative, from the end; the dimension of
            batches does not count. A mapping has the axis of each column to split; all
            other columns stay whole. Names of nested columns have slashes; items of a
            tuple have their numbers as names.
        along : str, optional
            Axis of the strategy's ``replica_shape``, so that only ranks with different
            coordinates along it have different slabs; default: all ranks of a replica.

        Returns
        -------
        Dataset
            A data set of the same cardinality.

        Raises
        ------
        ValueError
            If a column does not exist, if rows have no such axis, or different lengths
            along it, or if an earlier split divides rows over the same ranks; if
            elements are made of batches, as by `zip` after `batch`; during iteration,
            if a row differs in shape.
        """
        return Dataset(self.lineage.split(axis, along))

    def cache(self, filename: str = "") -> Dataset:
        """Keep the first epoch's elements in memory, and return them in each epoch.

        Not collective. A `shuffle` before `cache` has the same order in all epochs;
        call `shuffle` after `cache`.

        Parameters
        ----------
        filename : str
            Must be empty, because caches in files are not supported.

        Returns
        -------
        Dataset
            The same elements in each epoch.

        Raises
        ------
        ValueError
            If ``filename`` is not empty.
        """
        if filename:
            raise ValueError(
                f"expected a cache in memory, found the file {filename!r}; write the "
                "elements to HDF5 and read that"
            )
        return self._then(stages.cache)

    def prefetch(self, buffer_size: int) -> Dataset:
        """Let threads read the elements before the program requests them.

        Not collective.

        Parameters
        ----------
        buffer_size : int
            Number of elements (with random access: of batches) to read ahead; -1
            (AUTOTUNE) means 2. Rows of arrays on GPUs are not read ahead.

        Returns
        -------
        Dataset
            A data set of the same cardinality.
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
        """Return pairs of an element's number (int64) and the element.

        Not collective.

        Parameters
        ----------
        start : int
            Number of the first element.

        Returns
        -------
        Dataset
            A data set of the same cardinality.
        """
        return self._then(lambda s: stages.enumerate_elements(s, int(start)))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Return the elements of this data set, and then the elements of another one.

        Not collective.

        Parameters
        ----------
        dataset : Dataset
            The data set to append.

        Returns
        -------
        Dataset
            The elements of both.

        Raises
        ------
        TypeError
            If elements differ in structure or dtype.
        """
        return self._then(stages.concatenate, dataset)

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Combine one element of each of several data sets into one element.

        Not collective.

        Parameters
        ----------
        *datasets : Dataset, or one nested structure of them
            Data sets; the result has as many elements as the shortest of them.

        Returns
        -------
        Dataset
            A data set whose elements have the structure of ``datasets``.
        """
        given: Any = datasets[0] if len(datasets) == 1 else datasets
        (first, *others), structure = flatten(given)
        made: Dataset = first._then(
            lambda *parts: stages.zip_elements(unflatten(structure, list(parts))),
            *others,
        )
        return made

    # Methods that return a stream, without random access

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the elements for which a function is true.

        Not collective. Each worker then reads all elements.

        Parameters
        ----------
        predicate : callable
            Function of an element (items of a tuple become arguments).

        Returns
        -------
        Dataset
            A data set of unknown cardinality.
        """
        return self._then(lambda s: streams.selected(s, predicate))

    def take_while(self, predicate: Callable[..., Any]) -> Dataset:
        """Return the elements before the first one for which a function is false.

        Not collective.

        Parameters
        ----------
        predicate : callable
            Function of an element (items of a tuple become arguments).

        Returns
        -------
        Dataset
            A data set of unknown cardinality.
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
        """Make a data set from each element; return blocks of their elements in turn.

        Not collective.

        Parameters
        ----------
        map_func : callable
            Function that returns a data set for an element.
        cycle_length : int, optional
            Number of data sets that are open at the same time; default 2.
        block_length : int
            Number of elements from one data set before the next data set's turn.
        num_parallel_calls, deterministic : optional
            Ignored: the order is tf.data's order with one thread.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.

        Raises
        ------
        ValueError
            If a length is below 1.
        """
        cycle = 2 if cycle_length in (None, _AUTOTUNE) else checked_size(cycle_length)
        block = checked_size(block_length)
        made = self._then(
            lambda s: streams.interleaved(s, map_func, stage_of, cycle, block)
        )
        made.lineage.opens_files |= self.lineage.opens_names(
            lambda name: map_func(name).lineage
        )
        return made

    def flat_map(self, map_func: Callable[..., Any]) -> Dataset:
        """Make a data set from each element, and concatenate these data sets.

        Not collective.

        Parameters
        ----------
        map_func : callable
            Function that returns a data set for an element.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.
        """
        return self.interleave(map_func, 1, 1)

    def unbatch(self) -> Dataset:
        """Split batches into their rows, and return the rows as elements.

        Not collective.

        Returns
        -------
        Dataset
            A data set whose arrays have one dimension less.
        """
        return self._then(batch_streams.unbatched)

    def rebatch(
        self, batch_size: int | Sequence[int], drop_remainder: bool = False
    ) -> Dataset:
        """Return the rows of all batches in batches of other sizes.

        Not collective.

        Parameters
        ----------
        batch_size : int or sequence of int
            Number of rows in a batch; several sizes are used in turn.
        drop_remainder : bool
            Whether to leave out a last batch that is not full.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.

        Raises
        ------
        ValueError
            If a size is below 1.
        """
        sizes = stages.sizes_of_batches(batch_size)
        return self._then(lambda s: batch_streams.rebatched(s, sizes, drop_remainder))

    def pack(self, length: int, padding_value: Any = 0) -> Dataset:
        """Pack sequences of any length into rows of one length, in order.

        Not collective. A row is filled with whole sequences until the next sequence
        does not fit.

        Parameters
        ----------
        length : int
            First dimension of the arrays of a row.
        padding_value : scalar
            Value that fills the end of a row.

        Returns
        -------
        Dataset
            Elements are mappings: ``values`` in the sequences' structure, ``segments``,
            int32 (1 for the first sequence of the row and so on, 0 for the padding),
            and ``positions``, int32 (the place within each sequence, from 0).

        Raises
        ------
        ValueError
            If the length is below 1; during iteration, if a sequence is longer than it.
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
            Function that returns an element's length (items of a tuple become
            arguments).
        bucket_boundaries : sequence of int
            Increasing lengths; a bucket has the lengths from one boundary to below the
            next.
        bucket_batch_sizes : sequence of int
            Batch size of each bucket; there is one more bucket than boundaries.
        padded_shapes, padding_values : optional
            See `padded_batch`.
        pad_to_bucket_boundary : bool
            Whether to pad to one below the bucket's upper boundary.
        no_padding : bool
            Whether to stack without padding, because a bucket's elements have one
            shape.
        drop_remainder : bool
            Whether to leave out the batches that are not full when the data end.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.

        Raises
        ------
        ValueError
            If boundaries do not increase, or a size or the number of sizes is wrong.
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
        """Leave out the elements that cannot be made because of an error.

        Not collective.

        Parameters
        ----------
        log_warning : bool
            Whether to log each error.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.
        """
        return self._then(lambda s: streams.kept_errors_out(s, log_warning))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
    ) -> Dataset:
        """Return elements of several data sets, as ``choice_dataset`` selects them.

        Not collective.

        Parameters
        ----------
        datasets : sequence of Dataset
            Data sets whose elements have one structure.
        choice_dataset : Dataset
            Data set whose elements are numbers of data sets, from 0.
        stop_on_empty_dataset : bool
            Whether to end when a chosen data set has ended; if not, skip that choice.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.
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
        """Return elements of several data sets, each from a data set drawn by weights.

        Not collective.

        Parameters
        ----------
        datasets : sequence of Dataset
            Data sets whose elements have one structure.
        weights : sequence of float, optional
            Weight of each data set; default: equal weights.
        seed : int, optional
            Seed of the draws; default 0.
        stop_on_empty_dataset : bool
            Whether to end when a drawn data set has ended; if not, the others continue.

        Returns
        -------
        Dataset
            A data set of unknown cardinality.

        Raises
        ------
        ValueError
            If a weight is negative, or if there is not one weight for each data set.
        """
        key = 0 if seed is None else int(seed)
        return datasets[0]._then(
            lambda *s: streams.sampled(s, weights, key, stop_on_empty_dataset),
            *datasets[1:],
        )

    # Other methods

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Call a function with this data set, and return its result.

        Not collective.

        Parameters
        ----------
        transformation_func : callable
            Function that takes this data set and returns a data set.

        Returns
        -------
        Dataset
            The function's result.
        """
        return transformation_func(self)

    def with_options(self, options: Any) -> Dataset:
        """Return a data set of the same elements with other options.

        Not collective.

        Parameters
        ----------
        options : DatasetOptions
            Options, or any object that has ``auto_shard_policy`` or, like
            tf.data.Options, ``experimental_distribute.auto_shard_policy``.

        Returns
        -------
        Dataset
            The same elements.
        """
        return Dataset(self.lineage.with_options(options))

    def options(self) -> DatasetOptions:
        """Return the options of this data set.

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
            -1 if there is no end, -2 if only an iteration can count the elements.
        """
        return self.stage.cardinality

    @property
    def element_spec(self) -> Tree:
        """Shapes and dtypes of the arrays of an element, as ArraySpec.

        Functions of `map` are called with the first elements to learn these.
        """
        return self.lineage.spec()

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        """Combine all elements with a function.

        Not collective.

        Parameters
        ----------
        initial_state : object
            The first state.
        reduce_func : callable
            Function that takes the state and an element, and returns the next state.

        Returns
        -------
        object
            The last state.
        """
        combine = functools.partial(call_program, reduce_func)
        return functools.reduce(combine, self, initial_state)

    @property
    def epoch(self) -> int:
        """Number of the next iteration's epoch, from 0; can be set."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = int(value)

    def as_numpy_iterator(self) -> Iterator[Tree]:
        """Return an iterator over the next epoch; its elements are arrays already.

        Not collective.

        Returns
        -------
        iterator of tree
            The elements of the next epoch.
        """
        return iter(self)

    def __iter__(self) -> Iterator[Tree]:
        """Return an iterator over the elements of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        stage = self.stage
        if self.ahead and isinstance(stage, Batched) and not stage.is_on_gpu():

            def read(batch: Batch) -> Tree:
                return stage.read(batch, 0, len(batch))

            ahead = read_batches_ahead(stage, read, self.ahead, epoch=epoch)
            return map(writable, ahead)
        return map(writable, stage.iterate(epoch))

    def __len__(self) -> int:
        """Return the number of elements; raise TypeError if unknown or infinite."""
        if self.stage.cardinality < 0:
            what = "no end" if self.stage.cardinality == INFINITE else "unknown length"
            raise TypeError(
                f"expected a data set whose elements are counted, found one of {what}; "
                "use take(), or ask cardinality()"
            )
        return self.stage.cardinality

    def __bool__(self) -> bool:
        """Return True, even for a data set without elements."""
        return True

    def __repr__(self) -> str:
        """Describe the chain of methods, for people and for comparing ranks."""
        return f"<Dataset of {self.stage.describe()}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks, without calling functions of the program."""
        rows = {
            "elements": in_words(self.cardinality()),
            "examples": in_words(self.num_rows),
            "global batch": self.batch_size or "unknown",
            "made of": self.stage.describe(),
        }
        return table("Dataset", rows)

    def describe(self) -> str:
        """Describe the chain of methods; the text must be equal on all ranks.

        Not collective.

        Returns
        -------
        str
            Sizes, orders and types of the whole chain.
        """
        return f"a data set of {self.stage.describe()}"

    # Methods that distributed data sets call

    @property
    def stage(self) -> Stage:
        """The last stage of the chain; for the library's own modules."""
        return self.lineage.stage

    @property
    def ahead(self) -> int:
        """Number of batches to read ahead; for the library's own modules."""
        return self.lineage.ahead

    @property
    def num_rows(self) -> int:
        """Number of examples in an epoch; -1 if it has no end, -2 if unknown."""
        return self.stage.num_rows

    @property
    def batch_size(self) -> int | None:
        """Number of examples in a global batch; None if unknown."""
        return self.stage.batch_size

    @property
    def drop_remainder(self) -> bool:
        """True if the last batch is left out if it is not full."""
        return self.stage.drop_remainder

    def rows(self, epoch: int, start: int, stop: int) -> Array | slice:
        """Return row numbers at places of an epoch; for the library's own modules."""
        shuffled = shuffled_rows(self.stage)
        places = slice(start, stop)
        return places if shuffled is None else shuffled.rows(places, epoch)

    def order(self, epoch: int) -> Array | None:
        """Return all row numbers in the order of an epoch.

        Not collective; the same on every rank.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 0.

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
        """Use order version 1 for an epoch; for the library's own modules."""
        shuffled = shuffled_rows(self.stage)
        if shuffled is not None:
            shuffled.keep_exact(epoch, self.seed)

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The rule that divides the data set between workers."""
        return AutoShardPolicy.parse(self.options().auto_shard_policy)

    @property
    def files(self) -> list[str] | None:
        """Names of the files that the data set reads; None if it reads no files."""
        return self.lineage.files()

    def shard_files(self, num_shards: int, index: int) -> Dataset:
        """Make this data set again, from every ``num_shards``-th file only.

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
            The elements of this part.

        Raises
        ------
        ValueError
            If the chain reads no files.
        """
        return Dataset(self.lineage.shard_files(num_shards, index))

    def shard_by_hint(self, num_shards: int, index: int) -> Dataset:
        """Replace `SHARD_HINT` if the chain has it; for the library's own modules."""
        found = self.lineage.shard_by_hint(num_shards, index)
        return self if found is self.lineage else Dataset(found)

    def slabs(self, inside: Any) -> Dataset:
        """Replace each `split` by this rank's slabs; for the library's own modules."""
        found = self.lineage.slabs(inside)
        return self if found is self.lineage else Dataset(found)

    def auto_shard(self, num_workers: int, index: int) -> Dataset:
        """Return one worker's part of the data set, as the auto-shard policy says.

        Not collective. With policy DATA, and with AUTO if there are no files, each
        worker gets every ``num_workers``-th element. (A strategy instead cuts each
        global batch into pieces.)

        Parameters
        ----------
        num_workers : int
            Number of workers.
        index : int
            Number of the part, from 0.

        Returns
        -------
        Dataset
            The elements of this part.

        Raises
        ------
        ValueError
            If the policy is FILE and the data set reads no files.
        """
        ways = {
            AutoShardPolicy.FILE: self.shard_files,
            AutoShardPolicy.DATA: self.shard,
            AutoShardPolicy.HINT: self.shard_by_hint,
        }
        way = ways.get(self.lineage.policy())
        return self if way is None else way(num_workers, index)


def mix(
    datasets: Sequence[Dataset],
    weights: Sequence[float] | None = None,
    *,
    seed: int = 0,
) -> Dataset:
    """Mix the elements of several data sets by weights, without an end.

    Not collective. The result has random access, unlike the result of
    `Dataset.sample_from_datasets`. In each of its own epochs, a data set contributes
    each row exactly once.

    Parameters
    ----------
    datasets : sequence of Dataset
        Data sets with random access, not yet batched, whose elements have one
        structure.
    weights : sequence of float, optional
        Shares of the elements, rounded to 1/4096; default: equal shares.
    seed : int
        Seed of the order in which the data sets alternate.

    Returns
    -------
    Dataset
        A data set without an end.

    Raises
    ------
    ValueError
        If a data set has no random access or no elements, or if there is not one
        positive weight for each data set.
    TypeError
        If elements differ in structure or dtype.
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
