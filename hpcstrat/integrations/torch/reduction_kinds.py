"""PyTorch's reduction operations, expressed by functions of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Array
from hpcstrat.integrations.torch.host_tensors import require_numbers

__all__ = ["Reduction"]

_Reduce = dist.ReduceOp
_FUNCTIONS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_OF_BOOLEANS: dict[str, np.ufunc] = {
    **dict.fromkeys(("SUM", "MAX", "BOR"), np.bitwise_or),
    **dict.fromkeys(("PRODUCT", "MIN", "BAND"), np.bitwise_and),
    "BXOR": np.bitwise_xor,
}
# Operations of hpcstrat for numbers, and for booleans, which may be bytes in an array.
_OPERATIONS: dict[np.ufunc, ReduceOp] = {
    np.maximum: ReduceOp.MAX,
    np.minimum: ReduceOp.MIN,
}
_OPERATIONS_OF_BOOLEANS: dict[np.ufunc, ReduceOp] = {
    np.bitwise_or: ReduceOp.MAX,
    np.bitwise_and: ReduceOp.MIN,
}


class Reduction:
    """A reduction operation of torch, for tensors of one type on ``size`` ranks."""

    def __init__(self, options: Any, tensor: Any, size: int) -> None:
        op = getattr(options, "reduceOp", options)
        op = _Reduce.SUM if op is None else getattr(op, "op", op)
        self.name = name = str(getattr(op, "name", op)).rpartition(".")[2]
        require_numbers(tensor.dtype)
        functions = _OF_BOOLEANS if tensor.dtype is torch.bool else _FUNCTIONS
        if name not in functions:
            raise NotImplementedError(
                f"expected one of {', '.join(functions)} as reduction of "
                f"{tensor.dtype}, found {name}; use one of these"
            )
        if tensor.is_complex() and name in ("MAX", "MIN"):
            raise ValueError(
                f"expected real numbers for {name}, found {tensor.dtype}, which has no "
                "order; reduce its absolute values"
            )
        self.function = functions[name]
        self.size = size
        self.averages = name == "AVG"
        self.is_boolean = tensor.dtype is torch.bool
        self.inexact = tensor.is_floating_point() or tensor.is_complex()

    @property
    def divisor(self) -> int:
        """Divisor of a floating or complex result; 0 if the result is not divided."""
        return self.size if self.averages and self.inexact else 0

    @property
    def op(self) -> ReduceOp | None:
        """The operation of hpcstrat that makes this reduction; None if none does.

        An average of integers is a sum, which `conclude` divides.
        """
        if self.function is np.add:
            return ReduceOp.MEAN if self.divisor else ReduceOp.SUM
        known = _OPERATIONS_OF_BOOLEANS if self.is_boolean else _OPERATIONS
        return known.get(self.function)

    @property
    def stays(self) -> bool:
        """True if tensors on a GPU are reduced there, and `conclude` does nothing."""
        return self.op is not None and (self.inexact or not self.averages)

    def conclude(self, array: Array) -> None:
        """Divide sums of integers for an average; round towards zero, as torch does."""
        if self.averages and not self.inexact:
            array[...] = (array - np.fmod(array, self.size)) // self.size
