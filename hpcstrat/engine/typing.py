"""Type aliases and protocols; nothing here runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from hpcstrat.errors import CollectiveError

__all__ = [
    "Array",
    "ArrayLike",
    "CopyCheck",
    "Replicas",
    "SupportsCheckpoint",
    "SupportsDeferredCheckpoint",
    "Tree",
]

Array: TypeAlias = npt.NDArray[Any]
"""An array that a replica holds, of NumPy or CuPy."""

ArrayLike: TypeAlias = Any
"""An array, an array scalar, a Python number, or nested sequences of them."""

Tree: TypeAlias = Any
"""A leaf, or nested lists, tuples, named tuples and mappings of leaves."""


class Replicas(Protocol):
    """A strategy, as modules that only work for its replicas see it.

    They may lie below the strategies, which import them. `hpcstrat.strategies.Strategy`
    documents each member, and who must call it.
    """

    @property
    def replica_id(self) -> int: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def local_replicas(self) -> range: ...

    @property
    def logical(self) -> bool: ...

    @property
    def distributes(self) -> bool: ...

    @property
    def puts_on_gpu(self) -> bool: ...

    # The classes of these four lie above this module.
    @property
    def replicas(self) -> Any: ...

    @property
    def collectives(self) -> Any: ...

    @property
    def topology(self) -> Any: ...

    @property
    def cross_entry(self) -> Any: ...

    @property
    def split(self) -> Any: ...

    # `Settings` without None, which its fields allow until all ranks have agreed.
    @property
    def settings(self) -> Any: ...

    def together(self, what: str) -> AbstractContextManager[None]: ...

    def require_idle(self, what: str) -> None: ...

    def local_value(self, tree: Tree) -> Tree: ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any: ...


class CopyCheck(Protocol):
    """A check of variables whose copies all replicas keep equal."""

    def mark(self, run_index: int, mark: int) -> int:
        """Return the mark that the headers of calls after an entry into ``run`` carry.

        It is from 0 to 2**63 - 1, and equal on all replicas only if ``run_index`` is,
        and the copies that were looked at. ``mark`` is the one before.
        """

    def difference(self, comm: Any) -> CollectiveError | None:
        """Compare all copies after their hashes differed; collective over ``comm``.

        Return the error that all replicas raise; None where the copies are equal.
        """


@runtime_checkable
class SupportsCheckpoint(Protocol):
    """An object whose state is in variables, which a CheckpointManager saves.

    Any object with this method can be given to a `CheckpointManager`, by itself or in a
    dict or list of Variables. The kinds of its variables decide how values are restored
    on another number of replicas: see `CheckpointManager.restore`.
    """

    def checkpoint_variables(self) -> dict[str, Any]:
        """Return the variables that hold the state, by name.

        Not collective, but each replica returns the same names, in the same order.

        Returns
        -------
        dict of str to Variable
            All that there are now; called at each save and restore. A name may hold
            ``/``; the file has it below the object's own name.
        """


@runtime_checkable
class SupportsDeferredCheckpoint(SupportsCheckpoint, Protocol):
    """An object that makes variables later than it may be restored.

    An optimizer, for example, has momentum from the first step on. Such an object must
    be given to the manager by itself, not in a dict or list of Variables. With a method
    ``checkpoint_reset(names)`` it can go back to a checkpoint that was saved before it
    made these variables.
    """

    def checkpoint_spellings(self, name: str) -> list[str]:
        """Return all names that saved state may have.

        Not collective.

        Parameters
        ----------
        name : str
            As in `checkpoint_variables`.

        Returns
        -------
        list of str
            That one and others; the first that a file has is taken.
        """

    def checkpoint_defer(
        self,
        name: str,
        value: np.ndarray[Any, Any],
        strategy: Any = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Keep a saved value whose variable does not exist yet.

        Not collective, but all replicas are told of the same values, in one order.

        Parameters
        ----------
        name : str
            As `checkpoint_variables` has it later.
        value : ndarray
            The saved value.
        strategy : Strategy, optional
            Whose replicas restore; default: this process alone.
        is_part : bool
            Whether it is this replica's part, where each has one, not their total.
        """

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Continue from the restored values.

        Not collective.

        Parameters
        ----------
        num_replicas : int
            Number of replicas that had parts in the saved values.
        now : int
            Number of replicas that have restored them.
        """
