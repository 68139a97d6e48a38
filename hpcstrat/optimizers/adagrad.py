"""The Adagrad optimizer."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.rules import (
    CommonOptions,
    LearningRate,
    Step,
    require_range,
)


class Adagrad(Optimizer):
    """Adagrad: each element's rate decreases with the sum of its squared gradients.

    For a gradient ``g`` and the learning rate ``r``, each step adds ``g ** 2`` to the
    sum ``s`` and subtracts ``r * g / (sqrt(s) + epsilon)`` from the variable (Duchi,
    Hazan and Singer, Adaptive subgradient methods for online learning and stochastic
    optimization, JMLR 12:2121-2159, 2011). A sparse gradient changes only its rows.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function of the number of completed steps.
    initial_accumulator_value : float
        Initial value of ``s``; at least 0.
    epsilon : float
        Added to the denominator; positive.
    **options : object
        See `Optimizer`.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    elementwise = True
    _by_rows = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[CommonOptions],
    ) -> None:
        require_range("initial_accumulator_value", initial_accumulator_value, 0.0)
        require_range("epsilon", epsilon, 0.0, open_below=True)
        super().__init__(learning_rate, **options)
        self.epsilon = epsilon
        self.state = {"sum_of_squares": initial_accumulator_value}

    def update(  # numpydoc ignore=GL08
        self, step: Step, gradient: Array, value: Array, *slots: Array
    ) -> None:
        (squares,) = slots
        number = value.dtype.type
        scratch = np.multiply(gradient, gradient, out=self._scratch(value))
        squares += scratch
        np.sqrt(squares, out=scratch)
        scratch += number(self.epsilon)
        gradient /= scratch
        gradient *= number(step.rate)
        value -= gradient
