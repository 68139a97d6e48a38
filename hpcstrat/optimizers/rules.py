"""Update rules: the mathematics of optimizers, apart from sums over replicas."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypedDict

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, is_device
from hpcstrat.engine.native import load_update_rules
from hpcstrat.engine.options import VariableAggregation
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.typing import Array

LearningRate = float | Callable[[int], float]


class CommonOptions(TypedDict, total=False):
    """Options that every optimizer accepts; see `Optimizer`."""

    aggregation: VariableAggregation | str
    accumulate_steps: int
    clip_global_norm: float | None
    missing_gradients: Literal["error", "zeros"]
    sharded: bool


@dataclass(slots=True)
class Step:
    """The parameters of one update of one variable.

    Parameters
    ----------
    rate : float
        Learning rate.
    number : int
        Number of the step, from 1.
    name : str
        Name of the variable.
    """

    rate: float
    number: int
    name: str


Target = tuple[Step, list[Array]]
"""The `Step` that an update rule gets, and the arrays of a variable and its state."""


class UpdateRule(ABC):
    """A rule that updates one variable, given its combined gradient and its state.

    A rule computes with the arrays of one rank, and makes no collective call.
    """

    state: Mapping[str, float] = {}
    elementwise: bool = False

    _two_stages: bool = False
    """True if `update` is an elementwise ``_first_stage``, which overwrites the
    gradient, followed by a ``_second_stage``, which needs whole variables."""

    _by_rows: bool = False
    """True if a gradient of zero changes neither an element nor its state."""

    _buffers: dict[tuple[Any, ...], Array]

    @abstractmethod
    def update(
        self, step: Step, gradient: Array, value: Array, *slots: Any, **named: Any
    ) -> None:
        """Update a variable's array and its state in place; defined by subclasses.

        Not collective: all replicas get the same arguments. `apply_gradients` calls
        this method for each variable. For ``elementwise`` rules, several small
        variables may be passed as one flat array.

        Parameters
        ----------
        step : Step
            Learning rate, number of the step, and name of the variable.
        gradient : ndarray
            The combined gradient, scaled and clipped; the rule may overwrite it.
        value : ndarray of the same shape and dtype
            The variable's array.
        *slots : ndarray of the same shape and dtype
            The variable's state, in the order of ``state``. A subclass may use a named
            parameter for each array instead.
        **named : object
            Always empty; lets type checkers accept subclasses with other parameters.
        """

    def _is_marked(self, name: str) -> bool:
        """Return a mark of the variable ``name``, such as whether its value decays.

        Only small variables with equal marks are updated as one array."""
        return False

    def _first_stage(self, step: Step, gradient: Array, *slots: Array) -> None:
        """Overwrite the gradient with the result of the rule's first stage."""
        raise NotImplementedError

    def _second_stage(self, step: Step, gradient: Array, value: Array) -> None:
        """Update a variable with the result of the first stage."""
        raise NotImplementedError

    def update_arrays(
        self, step: Step, gradient: Array | IndexedSlices, wholes: list[Array]
    ) -> None:
        """Update the arrays of a variable and its state, given any kind of gradient.

        For the library's own modules."""
        if not isinstance(gradient, IndexedSlices):
            self.update(step, gradient, *wholes)
        elif not self._by_rows:
            self.update(step, gradient.to_dense(), *wholes)
        else:
            # Rows can be written back because indices are unique.
            parts = [whole[gradient.indices] for whole in wholes]
            self.update(step, gradient.values, *parts)
            for whole, part in zip(wholes, parts, strict=True):
                whole[gradient.indices] = part

    def _scratch(self, like: Array) -> Array:
        """Return an array of the same shape and dtype, which later calls reuse."""
        # One buffer per dtype, of the largest size, is enough, because variables are
        # updated one after the other.
        key = is_device(like), like.dtype
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < like.size:
            buffer = array_module(like).empty(like.size, like.dtype)
            self._buffers[key] = buffer
        return buffer[: like.size].reshape(like.shape)


@functools.cache
def compiled_rules() -> ModuleType | None:
    """Return the module of compiled update rules; None if it is not installed.

    Also None with ``HPCSTRAT_NATIVE=0``. Compiled rules and NumPy rules have results
    with the same bits, so some ranks may use compiled rules and others NumPy.
    """
    return load_update_rules() if Settings().resolved().native else None


def is_of_elements(kind: type) -> bool:
    """Return whether a class declares that its rule updates each element by itself.

    A subclass that defines another rule does not inherit the declaration."""
    return _declares(kind, "elementwise")


def has_two_stages(kind: type) -> bool:
    """Return whether a class declares that its rule has a first, elementwise stage."""
    return _declares(kind, "_two_stages")


def _declares(kind: type, name: str) -> bool:
    for each in kind.__mro__:
        if name in vars(each):
            return bool(vars(each)[name])
        if "update" in vars(each) or "_first_stage" in vars(each):
            return False
    return False


def require_range(
    name: str,
    value: float,
    least: float,
    *,
    below: float = math.inf,
    open_below: bool = False,
) -> None:
    """Raise ValueError unless ``least <= value < below``.

    NaN is always an error. With ``open_below``, ``least`` itself is an error, too."""
    # The condition is written with ``not``, because every comparison with NaN is false.
    if not least <= value < below or (open_below and value == least):
        sign = ">" if open_below else ">="
        end = "" if below == math.inf else f" and < {below}"
        raise ValueError(
            f"expected {name} {sign} {least}{end}, found {value}; change it"
        )


def require_options(
    accumulate_steps: int, clip_global_norm: float | None, missing_gradients: str
) -> None:
    """Raise ValueError if an option that every optimizer accepts is out of range."""
    require_range("accumulate_steps", accumulate_steps, 1)
    if int(accumulate_steps) != accumulate_steps:
        raise ValueError(
            "expected an integer as accumulate_steps, found "
            f"{accumulate_steps!r}; round it"
        )
    if clip_global_norm is not None:
        require_range("clip_global_norm", clip_global_norm, 0.0, open_below=True)
    if missing_gradients not in ("error", "zeros"):
        raise ValueError(
            "expected missing_gradients to be 'error' or 'zeros', found "
            f"{missing_gradients!r}; choose one"
        )
