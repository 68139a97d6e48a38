"""The SGD optimizer: stochastic gradient descent."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.rules import (
    CommonOptions,
    LearningRate,
    Step,
    compiled_rules,
)


class SGD(Optimizer):
    """Stochastic gradient descent, with or without momentum.

    Each step computes ``v = m * v - r * g`` from the momentum ``m``, learning rate
    ``r`` and gradient ``g``, and adds ``v`` to the variable. Nesterov's form adds
    ``m * v - r * g`` instead, with the new ``v`` (Sutskever et al., On the importance
    of initialization and momentum in deep learning, ICML 2013, PMLR 28(3):1139-1147).
    Without momentum, a sparse gradient changes only the rows that it contains.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function of the number of completed steps.
    momentum : float
        Momentum factor; at least 0.
    nesterov : bool
        Whether to use Nesterov's form; requires momentum.
    **options : object
        See `Optimizer`.

    Raises
    ------
    ValueError
        For a negative momentum, or Nesterov's form without momentum.
    """

    elementwise = True

    def __init__(
        self,
        learning_rate: LearningRate,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[CommonOptions],
    ) -> None:
        if momentum < 0 or (nesterov and not momentum):
            raise ValueError(
                f"expected momentum >= 0, and > 0 with nesterov=True, found {momentum};"
                " 0.9 is usual"
            )
        super().__init__(learning_rate, **options)
        self.momentum = momentum
        self.nesterov = nesterov
        if momentum:
            self.state = {"momentum": 0.0}
        # With momentum, rows without a gradient change, too.
        self._by_rows = not momentum

    def update(  # numpydoc ignore=GL08
        self, step: Step, gradient: Array, value: Array, *slots: Array
    ) -> None:
        number, rules = value.dtype.type, compiled_rules()
        if slots and rules is not None:
            arrays, factors = (gradient, value, *slots), (-step.rate, self.momentum)
            if rules.sgd(arrays, factors, self.nesterov):
                return
        gradient *= number(-step.rate)
        if not slots:
            value += gradient
            return
        (velocity,) = slots
        velocity *= number(self.momentum)
        velocity += gradient
        if not self.nesterov:
            value += velocity
            return
        gradient += np.multiply(
            velocity, number(self.momentum), out=self._scratch(value)
        )
        value += gradient
