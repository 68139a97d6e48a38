"""LAMB: Adam with a learning rate for each variable, for large batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.adam import AdamWithDecay
from hpcstrat.optimizers.gradients import sum_of_squares
from hpcstrat.optimizers.rules import CommonOptions, LearningRate, Step


class LAMB(AdamWithDecay):
    """LAMB: scales each variable's Adam step to the variable's norm, for large batches.

    Algorithm 2 of You et al., Large batch optimization for deep learning: training BERT
    in 76 minutes, ICLR 2020, arXiv:1904.00962. If ``a`` is Adam's step for a rate of 1
    and ``u = a + weight_decay * x``, then ``r * norm(x) / norm(u) * u`` is subtracted
    from the variable ``x``. If either norm is 0, the ratio of the norms counts as 1.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function of the number of completed steps.
    weight_decay : float
        Factor of the weight decay; at least 0.
    beta_1, beta_2 : float
        Decay rates of the moments; at least 0, below 1.
    epsilon : float
        Added to the denominator; positive.
    exclude : sequence of str
        Regular expressions, such as ``"bias"``. Variables whose name contains a match
        have no weight decay and unscaled steps, as in the authors' program.
    **options : object
        See `Optimizer`.

    Raises
    ------
    ValueError
        If a number is out of range, or an item of ``exclude`` is not a regular
        expression.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        *,
        epsilon: float = 1e-6,
        exclude: Sequence[str] = (),
        **options: Unpack[CommonOptions],
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay,
            beta_1,
            beta_2,
            epsilon=epsilon,
            exclude=exclude,
            **options,
        )

    _two_stages = True

    def update(  # numpydoc ignore=GL08
        self, step: Step, gradient: Array, value: Array, *slots: Array
    ) -> None:
        self._first_stage(step, gradient, *slots)
        self._second_stage(step, gradient, value)

    def _second_stage(self, step: Step, gradient: Array, value: Array) -> None:
        rate: Any = step.rate
        number = value.dtype.type
        if not self._is_excluded(step.name):
            gradient += np.multiply(
                value, number(self.weight_decay), out=self._scratch(value)
            )
            norms = sum_of_squares(value), sum_of_squares(gradient)
            if is_device(value):
                # Compute the rate on the GPU: reading the norms would wait for the GPU.
                rate = _trusted(rate, *norms).astype(value.dtype)
            elif all(norms):
                rate *= math.sqrt(norms[0]) / math.sqrt(norms[1])
        gradient *= rate if is_device(rate) else number(rate)
        value -= gradient


def _trusted(rate: float, value: Any, direction: Any) -> Any:
    """Return a variable's learning rate, computed on the GPU from squared norms."""
    ratio = np.sqrt(value) / np.sqrt(direction)
    trusted = (value != 0) & (direction != 0)
    return rate * array_module(value).where(trusted, ratio, 1.0)
