"""Gradients and their variables, as they are given to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpcstrat.arrays.kinds import is_device
from hpcstrat.gpu.optimizer_steps.update_kernels import prepare
from hpcstrat.optimizers.gradients import Gradient, checked_gradient, require_names
from hpcstrat.strategies import get_strategy
from hpcstrat.variables import Variable

__all__ = ["Pairs", "checked", "require_gradients"]

Pairs = Sequence[tuple[Gradient | None, Variable]]


@np.errstate(all="ignore")
def checked(grads_and_vars: Iterable[tuple[Any, Variable]]) -> Pairs:
    """Return what the caller of `apply_gradients` gives, of the variables' types.

    Raises ValueError for what cannot be used, before the replicas meet.
    """
    pairs = [
        (None if gradient is None else checked_gradient(gradient, variable), variable)
        for gradient, variable in grads_and_vars
    ]
    require_names(variable for _, variable in pairs)
    _require_owner(variable for _, variable in pairs)
    # What fails here fails before the replicas meet, so that the others are told.
    prepare({v.dtype for _, v in pairs if is_device(v.component)})
    return pairs


def _require_owner(variables: Iterable[Variable]) -> None:
    """Refuse variables whose copies would be updated apart."""
    strategy = get_strategy()
    for variable in variables:
        owner = variable.distribute_strategy
        if owner is strategy or (owner is None and strategy.num_replicas_in_sync == 1):
            continue
        if owner is None:
            raise ValueError(
                f"expected a variable made in the scope of {strategy!r}, found the "
                f"plain variable {variable.name!r}, of which each rank has its own; "
                "create it in the strategy's scope"
            )
        raise RuntimeError(
            f"expected apply_gradients of variable {variable.name!r} inside the "
            f"function that {owner!r} runs, found it outside; call it through "
            "strategy.run"
        )


def require_gradients(pairs: Pairs) -> None:
    """Refuse gradients that are all None."""
    if all(gradient is None for gradient, _ in pairs):
        names = ", ".join(variable.name for _, variable in pairs)
        raise ValueError(
            f"expected at least one gradient, found None for all of {names}; check "
            "that the loss depends on the variables"
        )
