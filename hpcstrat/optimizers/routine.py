"""What is the same in all steps of a training loop, and need not be done again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcstrat.arrays.kinds import is_device
from hpcstrat.optimizers.on_device import DeviceStep
from hpcstrat.optimizers.parameters import Target
from hpcstrat.typing import Replicas
from hpcstrat.variables import Variable

__all__ = ["Routine"]


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
    on_device : DeviceStep or None
        How variables on a GPU are updated; None without any.
    """

    def __init__(
        self,
        strategy: Replicas,
        pairs: Sequence[tuple[Any, Variable]],
        label: str,
    ) -> None:
        self._strategy = strategy
        self._expected = [
            (v, type(v.component), v.dtype, v.shape, _gpu(v.component))
            for _, v in pairs
        ]
        self.label = label
        self.non_finite: str = strategy.settings.non_finite
        self.targets: list[Target] = []
        self.on_device: DeviceStep | None = None

    def fits(self, strategy: Replicas, pairs: Sequence[tuple[Any, Variable]]) -> bool:
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
            Whether variables, types, shapes and devices are those of the first step.
        """
        if strategy is not self._strategy or len(pairs) != len(self._expected):
            return False
        for (gradient, given), (variable, kind, dtype, shape, gpu) in zip(
            pairs, self._expected, strict=True
        ):
            if (
                given is not variable
                or type(gradient) is not kind
                or gradient.dtype != dtype
                or gradient.shape != shape
                or (gpu is not None and gpu != _gpu(gradient))
            ):
                return False
        return True


def _gpu(array: Any) -> Any:
    # Arrays without elements are nowhere in particular.
    return array.data.device_id if is_device(array) and array.size else None
