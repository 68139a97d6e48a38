"""What an optimizer keeps between steps, and how checkpoints save and restore it."""

from __future__ import annotations

import numpy as np

from hpcstrat.logs import get_logger
from hpcstrat.optimizers.accumulation import Accumulation
from hpcstrat.optimizers.slot_names import spellings, unescaped
from hpcstrat.optimizers.slots import Slots
from hpcstrat.typing import Array, Replicas
from hpcstrat.variables import HostValue, Variable

__all__ = ["SavedState"]


class SavedState:
    """The state of an optimizer.

    Parameters
    ----------
    steps : int
        How many calls make one step.
    is_mean : bool
        Whether gradients are averaged over replicas.

    Attributes
    ----------
    iterations : Variable
        Number of steps done, int64.
    """

    def __init__(self, steps: int, is_mean: bool) -> None:
        self.iterations = Variable(
            HostValue(np.zeros((), np.int64)), trainable=False, name="iterations"
        )
        self._slots = Slots()
        # Variables of the latest step, by id.
        self._current: frozenset[int] = frozenset()
        self._accumulation = Accumulation(self._slots, steps, is_mean)

    def checkpoint_variables(self) -> dict[str, Variable]:
        """Return the state to save.

        Not collective.

        Returns
        -------
        dict of str to Variable
            ``iterations``, and ``<kind>/<variable>`` for each kind of state of each
            variable; with accumulation, how far it has come, and the sums. Restored
            state whose variable has not come yet is among it.

        Raises
        ------
        ValueError
            If two variables that have state have the same name.
        """
        self._slots.forget_garbage(self._current)
        rest = self._accumulation.own | self._slots.named()
        return {"iterations": self.iterations, **dict(sorted(rest.items()))}

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
        return spellings(unescaped(name))

    def checkpoint_defer(
        self,
        name: str,
        value: Array,
        strategy: Replicas | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Keep a saved value until its variable comes, at the first step.

        Not collective, but all replicas do it in the same order.

        Parameters
        ----------
        name : str
            As in `checkpoint_variables`.
        value : ndarray
            The saved value.
        strategy : Strategy, optional
            Whose replicas restore; default: this process alone.
        is_part : bool
            Whether it is this replica's part, where each has one, not their total.
        """
        if not self._accumulation.defer(name, value, strategy, is_part=is_part):
            self._slots.wait(name, value, strategy)

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
        if self._accumulation.restored(num_replicas, now):
            get_logger("optimizers").warning(
                "the checkpoint holds sums of an accumulation that has not ended, and "
                "accumulate_steps is 1: these gradients are not used"
            )
