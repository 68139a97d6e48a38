"""Compression of gradients in messages."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression"]


class _NoCompression:
    """Sends tensors uncompressed."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor unchanged, and None as context."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor unchanged."""
        return tensor


class _HalfCompression:
    """Sends floating-point numbers as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in float16, and its type as context."""
        # Integers, such as counts, must stay exact.
        wire = tensor.half() if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor in the type that it had before the compression."""
        return tensor.to(context)


class Compression:
    """Classes for ``compression``; another class with the same methods also works."""

    none = _NoCompression
    fp16 = _HalfCompression
