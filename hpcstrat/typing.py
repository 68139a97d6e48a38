"""Type aliases and protocols; nothing here runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hpcstrat.errors import CollectiveError

__all__ = ["Array", "ArrayLike", "CopyCheck", "SupportsCheckpoint", "Tree"]

Array: TypeAlias = npt.NDArray[Any]
"""An array that a replica holds; NumPy so far."""

ArrayLike: TypeAlias = Any
"""An array, an array scalar, a Python number, or nested sequences of them."""

Tree: TypeAlias = Any
"""A leaf, or nested lists, tuples, named tuples and mappings of leaves."""


class CopyCheck(Protocol):
    """What watches over variables whose copies all replicas keep equal."""

    def mark(self, run_index: int, mark: int) -> int:
        """Return what the headers of the calls after an entry into ``run`` carry.

        Logically collective over the replicas.

        Parameters
        ----------
        run_index : int
            How often this rank has entered ``run``.
        mark : int
            What they carried before.

        Returns
        -------
        int
            From 0 to 2**63 - 1; equal on all replicas only if ``run_index`` is, and
            the copies that were looked at.
        """

    def difference(self, comm: Any) -> CollectiveError | None:
        """Compare all copies, after marks that differ.

        Collective over ``comm``.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            The replicas, which are all at the same call.

        Returns
        -------
        CollectiveError or None
            What all replicas raise; None where the copies are equal.
        """


class SupportsCheckpoint(Protocol):
    """An object whose state is kept in variables, such as an optimizer."""

    def checkpoint_variables(self) -> dict[str, Any]:
        """Return the variables by name; names may hold ``/``.

        Not collective.

        Returns
        -------
        dict of str to Variable
            The state.
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
            That one and others.
        """

    def checkpoint_defer(
        self,
        name: str,
        value: np.ndarray[Any, Any],
        strategy: Any = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Take a saved value whose variable does not exist yet.

        Not collective.

        Parameters
        ----------
        name : str
            As in `checkpoint_variables`.
        value : ndarray
            The saved value.
        strategy : Strategy, optional
            Whose replicas restore.
        is_part : bool
            Whether it is this replica's part, where each has one, not their total.
        """

    def checkpoint_restored(self, num_replicas: int, now: int) -> None:
        """Go on from what has been restored.

        Not collective.

        Parameters
        ----------
        num_replicas : int
            How many had parts in what was saved.
        now : int
            How many have restored it.
        """
