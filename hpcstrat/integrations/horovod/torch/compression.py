"""Compression of gradients on their way."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression"]


class _NoCompression:
    """Tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class _HalfCompression:
    """Numbers in floating point as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return it in float16, and its type."""
        # Integers, such as counts, must stay exact.
        wire = tensor.half() if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return it in the type that it had."""
        return tensor.to(context)


class Compression:
    """The choices for ``compression``; a class with the same methods is one, too."""

    none = _NoCompression
    fp16 = _HalfCompression
