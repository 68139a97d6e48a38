"""Methods of TensorFlow 1's tf.distribute, implemented by the current methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from hpcstrat.data import Dataset
from hpcstrat.data.iterator import DistributedIterator, ReducibleDataset
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.options import InputContext, InputOptions, InputReplicationMode
from hpcstrat.engine.typing import Tree


class InputIterator:
    """Batches of a distributed data set, for methods of TensorFlow 1's tf.distribute.

    Parameters
    ----------
    dataset : DistributedDataset or DealtDataset
        The source of the batches.
    """

    def __init__(self, dataset: ReducibleDataset) -> None:
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None

    def __repr__(self) -> str:
        return f"InputIterator({self._dataset!r})"

    def initialize(self) -> None:
        """Begin a new iteration over the data set, such as the next epoch.

        Collective over the strategy's replicas. If the program does not call this
        method, the first `get_next` begins the first iteration.
        """
        self._iterator = iter(self._dataset)

    def get_next(self, name: str | None = None) -> Tree:
        """Return the next batch.

        Collective over the strategy's replicas.

        Parameters
        ----------
        name : str, optional
            Ignored; accepted for compatibility with tf.distribute.

        Returns
        -------
        tree
            The batch, with PerReplica leaves.

        Raises
        ------
        OutOfRangeError
            At the end of the data, on all replicas.
        """
        del name
        return self._begun().get_next()

    def _begun(self) -> DistributedIterator:
        if self._iterator is None:
            self.initialize()
        assert self._iterator is not None
        return self._iterator

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tree:
        return next(self._begun())


class OlderMethods:
    """Methods of `Strategy` for programs that were written for TensorFlow 1.

    TensorFlow 2 still has most of these methods, but does not document them."""

    def experimental_run_v2(
        self: Any,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """The older name of `run`, which calls a function on every replica."""
        return self.run(fn, args, kwargs, options)

    def experimental_run(
        self: Any, fn: Callable[..., Any], input_iterator: Any = None
    ) -> Any:
        """Call a function on every replica with the replica's part of the next batch.

        Collective over the strategy's replicas if reading the data set is collective.

        Parameters
        ----------
        fn : callable
            Called with this replica's batch, or with no argument if there is no
            iterator; runs in replica context.
        input_iterator : InputIterator, optional
            The result of `make_dataset_iterator` or `make_input_fn_iterator`.

        Returns
        -------
        object
            The result of `run`.

        Raises
        ------
        OutOfRangeError
            At the end of the data, on all replicas.
        """
        with self.scope():
            args = () if input_iterator is None else (input_iterator.get_next(),)
            return self.run(fn, args)

    def make_dataset_iterator(self: Any, dataset: Any) -> InputIterator:
        """The older name of `experimental_distribute_dataset`, for `experimental_run`.

        The result has the methods ``get_next`` and ``initialize``."""
        return InputIterator(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self: Any,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """The older name of `distribute_datasets_from_function`.

        The result is an iterator for `experimental_run`. ``replication_mode`` is the
        field ``experimental_replication_mode`` of InputOptions.
        """
        options = InputOptions(experimental_replication_mode=replication_mode)
        return InputIterator(self.distribute_datasets_from_function(input_fn, options))

    def experimental_distribute_datasets_from_function(
        self: Any,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """The older name of `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(
        self: Any, numpy_input: Tree, session: Any = None
    ) -> Dataset:
        """The older name of ``extended.experimental_make_numpy_dataset``."""
        make = self.extended.experimental_make_numpy_dataset
        dataset: Dataset = make(numpy_input, session)
        return dataset

    def unwrap(self: Any, value: Tree) -> tuple[Any, ...]:
        """The older name of `experimental_local_results`."""
        results: tuple[Any, ...] = self.experimental_local_results(value)
        return results

    def group(self: Any, value: Tree, name: str | None = None) -> Any:
        """Return None, because operations run immediately and cannot be grouped.

        Not collective.

        Parameters
        ----------
        value : tree
            A value such as the result of `run`.
        name : str, optional
            With a name the result is always None, as in TensorFlow.

        Returns
        -------
        object
            None; with one replica and no name, the value itself.
        """
        alone = self.num_replicas_in_sync == 1 and name is None
        return value if alone else None

    def colocate_vars_with(self: Any, colocate_with_variable: Any) -> Any:
        """The older name of ``extended.colocate_vars_with``."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing, because MPI defines the ranks and there are no sessions.

        Not collective.

        Parameters
        ----------
        session_config, cluster_spec, task_type, task_id : object, optional
            Not used.
        """
        del session_config, cluster_spec, task_type, task_id
        get_logger("strategies").debug("configure has nothing to do: MPI has the ranks")

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a session's configuration unchanged, because there are no sessions.

        Not collective.

        Parameters
        ----------
        config_proto : object
            Any object.

        Returns
        -------
        object
            The same object.
        """
        return config_proto
