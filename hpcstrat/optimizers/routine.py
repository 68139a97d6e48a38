"""What is the same in all steps of a training loop, and need not be done again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.optimizers.parameters import Step
from hpcstrat.typing import Array
from hpcstrat.variables import Variable

__all__ = ["Routine", "Target"]

Target = tuple[Step, list[Array]]


class Routine:
    """A step with a dense gradient for each of the same variables.

    Parameters
    ----------
    strategy : Strategy
        Inside which the step was made.
    pairs : sequence of (ndarray, Variable)
        As checked.
    label : str
        Name of the call.

    Attributes
    ----------
    label : str
        Name of the call.
    non_finite : str
        What to do about gradients that are not finite, see `Settings`.
    targets : list of (Step, list of ndarray)
        For each gradient, what to tell the update rule; the arrays of the variable and
        its state, which stay the same for good. Empty before the first step.
    """

    def __init__(
        self,
        strategy: Any,
        pairs: Sequence[tuple[Any, Variable]],
        label: str,
    ) -> None:
        self._strategy = strategy
        self._expected = [(v, v.dtype, v.shape) for _, v in pairs]
        self.label = label
        self.non_finite: str = strategy.settings.non_finite
        self.targets: list[Target] = []

    def fits(self, strategy: Any, pairs: Sequence[tuple[Any, Variable]]) -> bool:
        """Return whether another step is like this one, so that its checks hold.

        Not collective.

        Parameters
        ----------
        strategy : Strategy
            Inside which it is made.
        pairs : sequence of (object, Variable)
            What was given.

        Returns
        -------
        bool
            Whether variables, types and shapes are those of the first step.
        """
        if strategy is not self._strategy or len(pairs) != len(self._expected):
            return False
        for (gradient, given), (variable, dtype, shape) in zip(
            pairs, self._expected, strict=True
        ):
            if (
                given is not variable
                or type(gradient) is not np.ndarray
                or gradient.dtype != dtype
                or gradient.shape != shape
            ):
                return False
        return True
