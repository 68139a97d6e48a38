"""Compression of tensors before they are sent to other ranks."""

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
    """Sends floating-point tensors as float16, and other tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return a tensor of floats as float16, and its original type as context."""
        # Integers, such as counts, must stay exact.
        wire = tensor.half() if tensor.is_floating_point() else tensor
        return wire, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return the tensor in the type that it had before the compression."""
        return tensor.to(context)


class Compression:
    """Values of the argument ``compression``; any class with their methods works."""

    none = _NoCompression
    fp16 = _HalfCompression
