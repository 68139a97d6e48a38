"""A log with a digest (hash) of mirrored variables for each step, to compare two runs.

``hpcstrat verify-bits`` compares the logs of two runs whose values should have the same
bits, and prints the first step at which the logs differ. Each step hashes only one
slice of the variables, so that this takes a few microseconds for variables of any size.
Successive steps hash successive slices.
"""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import IO, Any

from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.safety.divergence.first_difference import octets

__all__ = ["StepDigests", "read_digests"]

SLICE_BYTES = 64 << 10
_MAGIC = "hpcstrat step digests 1"
_FLUSH_EVERY = 100

# A slice: the names of its variables, and their bytes.
_Slice = tuple[list[str], list[memoryview]]


class StepDigests:
    """Writes the digests of this rank to a new file in ``folder``.

    Creates the folder. Raises OSError if the file cannot be written.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = Path(folder) / f"digests-{time.time_ns()}.txt"
        self._file: IO[str] | None = self.path.open("x", encoding="utf-8")
        self._file.write(f"{_MAGIC}\n")
        self._variables: list[weakref.ref[Any]] = []
        self._slices: list[_Slice] = []
        self._step = 0

    def add(self, variable: Any) -> None:
        """Include a variable in the log from the next step on, until it is freed."""
        self._variables.append(weakref.ref(variable, self._freed))
        self._slices = []

    def _freed(self, reference: Any) -> None:
        if reference in self._variables:
            self._variables.remove(reference)
        # Drop the slices, which would keep the memory of the freed variable alive.
        self._slices = []

    def record(self) -> None:
        """Write the digest of the next slice; call before each step, and at the end."""
        if self._file is None:
            return
        if not self._slices:
            self._plan(self._file)
        if self._slices:
            number = self._step % len(self._slices)
            digest = 0
            for piece in self._slices[number][1]:
                digest = xxh3_64_intdigest(piece, digest)
            self._file.write(f"{self._step} {number} {digest:016x}\n")
        self._step += 1
        if not self._step % _FLUSH_EVERY:
            self._file.flush()

    def _plan(self, file: IO[str]) -> None:
        """Divide variables in host memory into slices; log the names in each slice."""
        left = 0
        for reference in self._variables:
            variable = reference()
            if variable is None or is_device(variable.component):
                continue
            flat: Any = octets(variable.component).reshape(-1)
            data = memoryview(flat)
            for start in range(0, len(data), SLICE_BYTES):
                piece = data[start : start + SLICE_BYTES]
                if len(piece) > left:
                    self._slices.append(([], []))
                    left = SLICE_BYTES
                names, pieces = self._slices[-1]
                names.append(variable.name)
                pieces.append(piece)
                left -= len(piece)
        for number, (names, _) in enumerate(self._slices):
            file.write(f"slice {number} {' '.join(dict.fromkeys(names))}\n")

    def close(self) -> None:
        """Write the digest after the last step, and close the file."""
        if self._file is not None:
            self.record()
            self._file.close()
            self._file = None


def read_digests(path: str | os.PathLike[str]) -> dict[int, tuple[str, str]]:
    """Return, by step, the digest in a log and the names of the hashed variables.

    Raises ValueError if the file is no log of digests.
    """
    names: dict[str, str] = {}
    found: dict[int, tuple[str, str]] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        if file.readline().strip() != _MAGIC:
            raise ValueError(
                "expected a log that the setting step_digests has written, found "
                f"{path}, which does not begin like one; pass a file digests-*.txt"
            )
        for line in file:
            first, number, rest = [*line.rstrip("\n").split(" ", 2), "", ""][:3]
            if first == "slice":
                names[number] = rest
            elif len(rest) == 16:
                # The last line may be incomplete if the run was killed.
                found[int(first)] = rest, names.get(number, "")
    return found
