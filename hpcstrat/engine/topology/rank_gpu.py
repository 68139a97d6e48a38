"""The description of a rank's GPU that ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance of a GPU, as seen by this process."""

    # CUDA device number in this process; other processes may number the GPU
    # differently.
    index: int
    # PCI bus id of the GPU, such as ``0000:3B:00.0``.
    pci_bus_id: str
    # UUID of the GPU or of the MIG instance; empty if unknown.
    uuid: str = ""
    # Product name, such as ``NVIDIA H100``.
    name: str = ""
    memory_bytes: int = 0
    # CUDA compute capability, such as ``9.0``.
    compute_capability: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """An identifier that is equal in two processes of a host for the same GPU."""
        return self.pci_bus_id.lower(), self.uuid

    def __str__(self) -> str:
        """Return bus id and name, for messages."""
        return f"{self.pci_bus_id} ({self.name})" if self.name else self.pci_bus_id
