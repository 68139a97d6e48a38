"""Sparse gradients as rows that the library's calls take, and back."""

from __future__ import annotations

from typing import Any

import torch

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.integrations.torch.tensors import as_tensor, memory_of

__all__ = ["gradient_of", "rows_of"]


def rows_of(
    gradient: torch.Tensor | None, parameter: torch.Tensor, name: str
) -> IndexedSlices:
    """Return the rows of a parameter's gradient; no rows where it has none."""
    shape = tuple(parameter.shape)
    if gradient is None:
        indices = torch.zeros(0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_zeros((0, *shape[1:]))
        return IndexedSlices(memory_of(values), memory_of(indices), shape)
    if gradient.sparse_dim() != 1:
        raise ValueError(
            f"expected a sparse gradient of {name!r} with one index for each row, "
            f"found {gradient.sparse_dim()} indices for each value; make it dense"
        )
    gradient = gradient.coalesce()
    values, indices = gradient.values(), gradient.indices()[0]
    return IndexedSlices(memory_of(values), memory_of(indices), shape)


def gradient_of(rows: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return rows as a sparse gradient of a parameter."""
    # Cloned: another backward enlarges what coalesce has left as it was, such as no
    # rows at all, and memory of NumPy cannot be enlarged.
    made: torch.Tensor = torch.sparse_coo_tensor(
        as_tensor(rows.indices).to(parameter.device)[None].clone(),
        as_tensor(rows.values).to(parameter.device).clone(),
        parameter.shape,
        # Without a word on checks, torch warns that there are none.
        check_invariants=False,
    )
    return made.coalesce()
