"""Parameters that optimizers share, and checks of their ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

from hpcstrat.engine.options import VariableAggregation
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
