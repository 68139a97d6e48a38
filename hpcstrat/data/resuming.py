"""Streams and iterables that go on where a checkpoint found them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hpcstrat.data.dataset import Dataset
from hpcstrat.data.dealing import DealtDataset
from hpcstrat.data.iterator import DistributedIterator, EpochPlace, ReducibleDataset
from hpcstrat.data.order import ORDER_VERSION
from hpcstrat.data.pipelines import PipelinePlace, iterable_steps
from hpcstrat.data.rows import UNKNOWN
from hpcstrat.engine.arrays.kinds import as_array
from hpcstrat.engine.options import AutoShardPolicy, InputOptions
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Replicas, Tree

__all__ = ["ResumableDataset", "StatefulDataset", "StreamDataset"]


class ResumableDataset(ReducibleDataset):
    """The base of distributed data sets whose iterations go on after a restore."""

    _dataset: Dataset
    # Epoch and position of the next iteration.
    _next = (0, 0)
    # Where the latest one stands; None before it, and after a restore.
    _latest: EpochPlace | None = None

    @property
    def num_rows(self) -> int:
        """Number of examples of an epoch, over all replicas; below 0 if not known."""
        return UNKNOWN

    @property
    def element_spec(self) -> Tree:
        """Shapes and dtypes of the arrays of a global batch, as ArraySpec."""
        return self._dataset.element_spec

    @property
    def epoch(self) -> int:
        """The epoch of the latest iteration, or that of the next, where it has ended.

        Setting it makes the next iteration that epoch, from its beginning.
        """
        return self.state()["epoch"]

    @epoch.setter
    def epoch(self, value: int) -> None:
        """Begin the next iteration with this epoch.

        Not collective.

        Parameters
        ----------
        value : int
            From 0.
        """
        self._next, self._latest = (int(value), 0), None

    def _begin_at(self, place: EpochPlace) -> None:
        # At once, so that a loop that is left early does not repeat its epoch.
        self._next, self._latest = (place.epoch + 1, 0), place

    def state(self) -> dict[str, int]:
        """Return where the latest iteration stands.

        Not collective; the same on every replica after the same step.

        Returns
        -------
        dict of str to int
            ``epoch``, ``global_position`` (examples given out in it, over all replicas;
            of a stream, steps), ``shuffle_seed``, ``num_rows`` (-2 if not known),
            ``order_version``, and of a stream ``num_parts``.
        """
        epoch, position = self._next
        if self._latest is not None:
            epoch, position = self._latest.epoch, self._latest.position
        return {
            "epoch": epoch,
            "global_position": position,
            "shuffle_seed": self._dataset.seed,
            "num_rows": self.num_rows,
            "order_version": ORDER_VERSION,
            **self._more_state(),
        }

    def _more_state(self) -> dict[str, int]:
        """Return into how many parts the data are cut, where ranks may differ in it."""
        return {}

    def check_state(self, state: dict[str, int]) -> None:
        """Check that a state is of this data set.

        Not collective.

        Parameters
        ----------
        state : dict of str to int
            From `state`, perhaps of another number of replicas.

        Raises
        ------
        ValueError
            If it is that of another data set, or of another division of its files.
        """
        own = self.state()
        for key in ("num_rows", "shuffle_seed", *self._more_state()):
            if int(state.get(key, 0)) != own[key]:
                advice = "restore with the data set that was saved"
                if key == "num_parts":
                    advice += ", with as many ranks, as each worker reads its own files"
                raise ValueError(
                    f"expected the position in a data set with {key} {own[key]}, found "
                    f"{state.get(key)}; {advice}"
                )

    def restore_state(self, state: dict[str, int]) -> None:
        """Make the next iteration go on where another stood.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict of str to int
            From `state`, perhaps of another number of replicas.

        Raises
        ------
        ValueError
            If the state is that of another data set.
        """
        self.check_state(state)
        self._next = (int(state["epoch"]), int(state["global_position"]))
        self._latest = None
        self._keep_order(int(state.get("order_version", 1)))

    def _keep_order(self, version: int) -> None:
        """Let an epoch that was begun by an older order go on in that."""


class StreamDataset(ResumableDataset, DealtDataset):
    """Per-replica batches of a chain without random access, which can be resumed.

    As `DealtDataset`. A restored iteration makes the batches before its position again,
    and leaves them out. Where workers read parts of their own (policies FILE, OFF and
    HINT), it goes on with the same number of workers and replicas only.

    Parameters
    ----------
    strategy : Strategy
        Whose replicas.
    place : PipelinePlace
        This replica's.
    dataset : Dataset
        The chain.
    options : InputOptions
        As of `DealtDataset`.
    """

    def __init__(
        self,
        strategy: Replicas,
        place: PipelinePlace,
        dataset: Dataset,
        options: InputOptions,
    ) -> None:
        super().__init__(
            strategy, place, lambda: iterable_steps(dataset, place), options
        )
        self._dataset = dataset

    def __iter__(self) -> DistributedIterator:
        """Begin the next epoch, or go on where `restore_state` said."""
        place = EpochPlace(*self._next)
        self._begin_at(place)
        return DistributedIterator(self._begin(place), self)

    def _more_state(self) -> dict[str, int]:
        parts = 1
        if self._dataset.lineage.policy() is not AutoShardPolicy.DATA:
            parts = self._place.num_workers * self._place.num_replicas
        return {"num_parts": parts}

    def _source(self) -> str:
        return self._dataset.describe()


class StatefulDataset(DealtDataset):
    """Per-replica batches of an iterable that can save its position itself.

    As `DealtDataset`. The iterable has ``state_dict`` and ``load_state_dict``, as
    torchdata's StatefulDataLoader does. All workers read the same batches, so that its
    position means the same on any number of replicas.

    Parameters
    ----------
    strategy : Strategy
        Whose replicas.
    place : PipelinePlace
        This replica's.
    iterable : iterable
        Gives global batches.
    options : InputOptions
        As of `DealtDataset`.
    """

    def __init__(
        self,
        strategy: Replicas,
        place: PipelinePlace,
        iterable: Any,
        options: InputOptions,
    ) -> None:
        super().__init__(
            strategy, place, lambda: iterable_steps(iterable, place), options
        )
        self._iterable = iterable

    def state_dict(self) -> dict[str, Any]:
        """Return the iterable's position, behind the batches that were given out.

        Collective over the strategy's replicas.

        Returns
        -------
        dict
            Of numbers, text and bytes: that of replica 0, on all.

        Raises
        ------
        ValueError
            Where workers read parts of their own, which have no common position.
        """
        mine: dict[str, Any] = {}
        several = self._place.num_replicas > 1
        if self._steps is not None and (self._steps.shared or not several):
            mine = self._own_state()
        if several:
            found = self._strategy.collectives.all_gather_object(mine, "position")
            mine = found[0]
        if not mine:
            raise ValueError(
                "expected workers that read the same batches, so that there is one "
                "position to save, found parts of their own; use auto-shard policy "
                "DATA or single_pipeline=True, or leave the data set out"
            )
        return mine

    def _own_state(self) -> dict[str, Any]:
        """Return the position of this replica's iterable."""
        leaves, structure = flatten(self._iterable.state_dict())
        arrays: list[Any] = []
        for number, leaf in enumerate(leaves):
            # Such as the state of a generator of random numbers, a tensor of torch's.
            if isinstance(leaf, np.ndarray) or hasattr(leaf, "__dlpack__"):
                array = np.ascontiguousarray(as_array(leaf))
                is_tensor = not isinstance(leaf, (np.ndarray, np.generic))
                parts = [array.dtype.str, list(array.shape), array.tobytes()]
                arrays.append([number, is_tensor, *parts])
                leaves[number] = None
        return {"state": unflatten(structure, leaves), "arrays": arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where another stood.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict
            Of replica 0.
        """
        if self._steps is None:
            return
        leaves, structure = flatten(state["state"])
        torch = sys.modules.get("torch")
        for number, is_tensor, dtype, shape, data in state["arrays"]:
            array = np.frombuffer(data, dtype).reshape(shape).copy()
            tensor = torch is not None and is_tensor
            leaves[number] = torch.from_numpy(array) if tensor else array  # type: ignore[union-attr]
        self._iterable.load_state_dict(unflatten(structure, leaves))

    def _source(self) -> str:
        return f"a {type(self._iterable).__name__}"
