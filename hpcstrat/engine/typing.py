"""Type aliases and protocols; this module has no code that runs."""

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
"""An array of NumPy or CuPy in a replica's memory."""

ArrayLike: TypeAlias = Any
"""An array, an array scalar, a Python number, or nested sequences of them."""

Tree: TypeAlias = Any
"""A leaf, or nested lists, tuples, named tuples and mappings of leaves."""


class Replicas(Protocol):
    """The members of a strategy that lower modules may use.

    Modules that the strategies import cannot import the class Strategy itself.
    `hpcstrat.strategies.Strategy` documents each member, and who must call it.
    """

    @property
    def replica_id(self) -> int: ...

    @property
    def writes(self) -> bool: ...

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

    # `Any`, because the modules of the next six members import this module.
    @property
    def replicas(self) -> Any: ...

    @property
    def collectives(self) -> Any: ...

    @property
    def topology(self) -> Any: ...

    @property
    def cross_context(self) -> Any: ...

    @property
    def split(self) -> Any: ...

    @property
    def inside(self) -> Any: ...

    @property
    def all_ranks(self) -> Any: ...

    # `Any` instead of `Settings`, whose fields may be None until all ranks have agreed.
    @property
    def settings(self) -> Any: ...

    def together(self, what: str) -> AbstractContextManager[None]: ...

    def require_idle(self, what: str) -> None: ...

    def local_value(self, tree: Tree) -> Tree: ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any: ...


class CopyCheck(Protocol):
    """A check that the copies of variables are equal on all replicas."""

    def mark(self, run_index: int, mark: int) -> int:
        """Return the fingerprint for the headers of calls after a begin of ``run``.

        The fingerprint, from 0 to 2**63 - 1, is equal on all replicas only if
        ``run_index`` and the parts of the copies that were hashed are equal. ``mark``
        is the previous fingerprint.
        """

    def difference(self, comm: Any) -> CollectiveError | None:
        """Compare all copies, after fingerprints differed; collective over ``comm``.

        Returns the error that all replicas raise, or None if the copies are equal.
        """


@runtime_checkable
class SupportsCheckpoint(Protocol):
    """An object whose state is in variables, which a CheckpointManager can save.

    Any object with this method can be passed to a `CheckpointManager`, by itself or in
    a dict or list of Variables. The kind of each variable determines how its value is
    restored on another number of replicas: see `CheckpointManager.restore`.
    """

    def checkpoint_variables(self) -> dict[str, Any]:
        """Return the variables that contain the state, by name.

        Not collective, but each replica must return the same names in the same order.

        Returns
        -------
        dict of str to Variable
            All variables that exist now; the manager calls this method at each save and
            restore. A name may contain ``/``. In the file, the names are below the name
            of the object.
        """


@runtime_checkable
class SupportsDeferredCheckpoint(SupportsCheckpoint, Protocol):
    """An object that may make some of its variables only after a restore.

    For example, an optimizer makes its momentum variables in the first step. An object
    of this kind must be passed to the manager by itself, not in a dict or list of
    Variables. If it has a method ``checkpoint_reset(names)``, it can also be restored
    from a checkpoint that was saved before it made the variables ``names``.
    """

    def checkpoint_spellings(self, name: str) -> list[str]:
        """Return all names under which a file may have saved a variable.

        Not collective.

        Parameters
        ----------
        name : str
            A name of `checkpoint_variables`.

        Returns
        -------
        list of str
            ``name`` and alternative names; the first name that a file has is restored.
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

        Not collective, but it is called for the same values in the same order on all
        replicas.

        Parameters
        ----------
        name : str
            The name that `checkpoint_variables` will return for the variable.
        value : ndarray
            The saved value.
        strategy : Strategy, optional
            The strategy whose replicas restore; default: this process alone.
        is_part : bool
            Whether ``value`` is the part of this replica alone; if not, it is the total
            over all replicas.
        """

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Complete a restore, after all values have been restored or kept.

        Not collective.

        Parameters
        ----------
        num_replicas : int
            Number of replicas that saved the values.
        now : int
            Number of replicas that restored the values.
        """
