"""The GPU of a rank, as all ranks may know it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a part of one (MIG), as this process sees it."""

    # Its number in this process; another process may have another number for it.
    index: int
    # Its place in the machine, such as ``0000:3B:00.0``.
    pci_bus_id: str
    # Identifier of the GPU, or of the part of one (MIG); empty if unknown.
    uuid: str = ""
    # Such as ``NVIDIA H100``.
    name: str = ""
    memory_bytes: int = 0
    # Such as ``9.0``.
    compute_capability: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        """A name that two processes of a host share if they see the same GPU."""
        return self.pci_bus_id.lower(), self.uuid

    def __str__(self) -> str:
        """Return bus id and name, for messages."""
        return f"{self.pci_bus_id} ({self.name})" if self.name else self.pci_bus_id
