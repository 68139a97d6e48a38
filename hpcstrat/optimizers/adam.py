"""Adam, and AdamW with decoupled weight decay."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.optimizers.optimizer import Optimizer
from hpcstrat.optimizers.rules import (
    CommonOptions,
    LearningRate,
    Step,
    compiled_rules,
    require_range,
)


class Adam(Optimizer):
    """Adam: steps from running estimates of the gradient's first and second moments.

    Algorithm 1 of Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015,
    arXiv:1412.6980, where ``t`` is the number of this step, from 1: ``m = beta_1 * m +
    (1 - beta_1) * g``, ``v = beta_2 * v + (1 - beta_2) * g ** 2``, and ``r * m' /
    (sqrt(v') + epsilon)`` is subtracted from the variable, where ``m' = m / (1 - beta_1
    ** t)`` and ``v' = v / (1 - beta_2 ** t)``. Rows without a gradient have gradient 0.

    Parameters
    ----------
    learning_rate : float or callable
        A number, or a function of the number of completed steps.
    beta_1, beta_2 : float
        Decay rates of ``m`` and ``v``; at least 0, below 1.
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
    state = {"first_moment": 0.0, "second_moment": 0.0}  # noqa: RUF012

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[CommonOptions],
    ) -> None:
        require_range("beta_1", beta_1, 0.0, below=1.0)
        require_range("beta_2", beta_2, 0.0, below=1.0)
        require_range("epsilon", epsilon, 0.0, open_below=True)
        super().__init__(learning_rate, **options)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def update(  # numpydoc ignore=GL08
        self, step: Step, gradient: Array, value: Array, *slots: Array
    ) -> None:
        kept = self._kept(step)
        if self._in_one_pass((gradient, *slots, value), step, kept):
            return
        number = value.dtype.type
        if kept != 1:
            # The decay comes before the step: it multiplies the variable's old value.
            value *= number(kept)
        self._first_stage(step, gradient, *slots)
        gradient *= number(step.rate)
        value -= gradient

    def _kept(self, step: Step) -> float:
        """Return the factor that this step's weight decay applies to the variable."""
        del step
        return 1.0

    def _in_one_pass(
        self, arrays: tuple[Array, ...], step: Step, kept: float = 1.0
    ) -> bool:
        """Update arrays with the compiled rule; return False if it cannot be used.

        The arrays are the gradient, the moments, and the variable. Without the
        variable, the compiled rule does the work of `_first_stage`.
        """
        rules = compiled_rules()
        if rules is None:
            return False
        factors = (
            self.beta_1,
            1 - self.beta_1,
            self.beta_2,
            1 - self.beta_2,
            self._root(step),
            self.epsilon,
            self._bias(step),
            step.rate,
            kept,
        )
        taken: bool = rules.adam(arrays, factors)
        return taken

    def _first_stage(self, step: Step, gradient: Array, *slots: Array) -> None:
        """Update the moments; overwrite the gradient with Adam's step for rate 1."""
        if self._in_one_pass((gradient, *slots), step):
            return
        m, v = slots
        number = gradient.dtype.type
        scratch = np.multiply(
            gradient, number(1 - self.beta_1), out=self._scratch(gradient)
        )
        m *= number(self.beta_1)
        m += scratch
        # Square first: the square of a gradient scaled by (1 - beta_2) could underflow.
        gradient *= gradient
        gradient *= number(1 - self.beta_2)
        v *= number(self.beta_2)
        v += gradient
        np.sqrt(v, out=scratch)
        scratch /= number(self._root(step))
        scratch += number(self.epsilon)
        np.divide(m, scratch, out=gradient)
        gradient /= number(self._bias(step))

    # In float32, ``1 - beta**number`` would lose digits: compute in double precision.

    def _root(self, step: Step) -> float:
        return math.sqrt(1 - self.beta_2**step.number)

    def _bias(self, step: Step) -> float:
        return 1 - self.beta_1**step.number


class AdamWithDecay(Adam):
    """Base class of optimizers with weight decay, which can exclude some variables.

    A variable is excluded if a regular expression in ``exclude`` is found in its name.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        *,
        epsilon: float = 1e-7,
        exclude: Sequence[str] = (),
        **options: Unpack[CommonOptions],
    ) -> None:
        require_range("weight_decay", weight_decay, 0.0)
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)
        self.weight_decay = weight_decay
        try:
            # A str is a single pattern, not a sequence of patterns of one letter.
            one = [exclude] if isinstance(exclude, str) else exclude
            self._exclude = [re.compile(pattern) for pattern in one]
        except (re.error, TypeError) as error:
            raise ValueError(
                f"expected names or regular expressions as exclude, found {exclude!r} "
                f"({error}); escape special characters with re.escape"
            ) from error

    def _is_excluded(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._exclude)

    def _is_marked(self, name: str) -> bool:
        return not self._is_excluded(name)


class AdamW(AdamWithDecay):
    """AdamW: Adam with weight decay that is separate from the gradient.

    In addition to `Adam`'s step, each step subtracts ``r * weight_decay`` times the
    variable's old value (Loshchilov and Hutter, Decoupled weight decay regularization,
    ICLR 2019, arXiv:1711.05101, Algorithm 2; as in other libraries, the learning rate
    ``r`` replaces the paper's schedule multiplier).

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
        do not decay.
    **options : object
        See `Optimizer`.

    Raises
    ------
    ValueError
        If a number is out of range, or an item of ``exclude`` is not a regular
        expression.
    """

    elementwise = True

    def _kept(self, step: Step) -> float:
        if self._is_excluded(step.name):
            return 1.0
        return 1 - step.rate * self.weight_decay
