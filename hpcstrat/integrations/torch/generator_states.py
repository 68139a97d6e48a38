"""States of the random generators that programs of PyTorch use, for checkpoints."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hpcstrat.engine.typing import Array
from hpcstrat.strategies import Strategy

__all__ = ["GeneratorStates"]

_KIND = "torch, numpy, random"
# Words of uint64 for a replica's states: first a word with a bit for each state that
# is there; torch's generator of the host (5056 bytes); its generator of this replica's
# GPU (16 bytes); NumPy's, and Python's: each 624 words of 32 bits, a position, and a
# number of a normal distribution that was drawn ahead, if there is one.
_HOST, _GPU, _TWISTER = 632, 2, 312 + 3
_STARTS = np.cumsum([1, _HOST, _GPU, _TWISTER, _TWISTER])
_NUM_WORDS = int(_STARTS[-1])


class GeneratorStates:
    """The states of the generators of each replica; saved like random streams.

    A restore on another number of replicas gives each replica with a saved state its
    state. Further replicas keep the states that the program has given them. If replicas
    have several ranks, which may draw other numbers, these are the states of each rank.
    """

    checkpoint_section = "rng"
    # Checkpoints of older versions have no such states.
    checkpoint_may_lack = True

    def __init__(self, strategy: Strategy) -> None:
        self.distribute_strategy = strategy

    def state(self) -> dict[str, Any]:
        """Return the states of all replicas; collective over them."""
        # Logical replicas of a rank share the rank's generators.
        rows = np.stack([_packed()] * len(self._places))
        collectives = self.distribute_strategy.all_ranks.collectives
        return _described(collectives.all_gather(rows, 0, "states of generators"))

    def own_state(self) -> dict[str, Any]:
        """Return the states of this process's replicas."""
        return _described(_packed()[None])

    @property
    def _places(self) -> Sequence[int]:
        """The rows of this rank."""
        strategy = self.distribute_strategy
        ranks = strategy.all_ranks
        return strategy.local_replicas if ranks is strategy else [ranks.rank]

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless a saved state is one of these generators."""
        shape = np.shape(state["state"])[1:]
        if state["bit_generator"] != _KIND or shape != (_NUM_WORDS,):
            raise ValueError(
                f"expected {_NUM_WORDS} words of the generators of {_KIND}, found "
                f"{list(shape)} of {state['bit_generator']}; restore with the version "
                "that saved it, or leave this object out with only="
            )

    def restore_state(self, state: dict[str, Any]) -> None:
        """Set this replica's generators to its row of a saved state; not collective."""
        rows, first = state["state"], self._places[0]
        own = rows[first] if first < len(rows) else None
        self.restore_own_state(state, [own], changed=False)

    def restore_own_state(
        self, state: dict[str, Any], rows: Sequence[Array | None], *, changed: bool
    ) -> None:
        """Set this replica's generators to a saved row, or keep them if it is None."""
        del changed
        if rows[0] is not None:
            self.check_state({**state, "state": rows[0][None]})
            _unpack(rows[0])


def _described(rows: Array) -> dict[str, Any]:
    # The file format requires an array for a stream that replicas share.
    shared = np.zeros(1, np.uint64)
    fixed = {"bit_generator": _KIND, "root_entropy": 0, "generation": 0}
    return {**fixed, "state": rows, "shared": shared}


def _packed() -> Array:
    """Return the states of this process's generators as words."""
    parts: list[Array | None] = [torch.get_rng_state().numpy().view(np.uint64)]
    gpu = torch.cuda.is_initialized()
    parts.append(torch.cuda.get_rng_state().numpy().view(np.uint64) if gpu else None)
    kind, *legacy = _numpys()
    # The program may have given NumPy another bit generator.
    parts.append(_twister(*legacy) if kind == "MT19937" else None)
    _, (*words, position), ahead = random.getstate()
    parts.append(_twister(np.array(words), position, ahead is not None, ahead or 0.0))
    row = np.zeros(_NUM_WORDS, np.uint64)
    for index, part in enumerate(parts):
        start = _STARTS[index]
        if part is not None and len(part) == _STARTS[index + 1] - start:
            row[0] |= np.uint64(1 << index)
            row[start : start + len(part)] = part
    return row


def _numpys() -> Any:
    return np.random.get_state()  # noqa: NPY002 - the program may use it


def _unpack(row: Array) -> None:
    """Set the generators of this process whose states are there."""
    there = int(row[0])
    host, gpu, legacy, python = (
        row[start:stop].astype(np.uint64) if there & 1 << index else None
        for index, (start, stop) in enumerate(itertools.pairwise(_STARTS))
    )
    if host is not None:
        torch.set_rng_state(torch.from_numpy(host.view(np.uint8)))
    if gpu is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(gpu.view(np.uint8)))
    if legacy is not None and _numpys()[0] == "MT19937":
        np.random.set_state(("MT19937", *_untwisted(legacy)))  # noqa: NPY002
    if python is not None:
        words, position, has_next, ahead = _untwisted(python)
        state = 3, (*words.tolist(), position), ahead if has_next else None
        random.setstate(state)


def _twister(words: Array, position: int, has_next: int, ahead: float) -> Array:
    """Return the state of a Mersenne Twister as 64-bit words."""
    rest = [position, int(has_next), *struct.unpack("<Q", struct.pack("<d", ahead))]
    pairs = words.astype("<u4").view("<u8")
    return np.concatenate([pairs, np.array(rest, np.uint64)])


def _untwisted(row: Array) -> tuple[Array, int, int, float]:
    words = row[:-3].astype("<u8").view("<u4").astype(np.uint32)
    (ahead,) = struct.unpack("<d", struct.pack("<Q", int(row[-1])))
    return words, int(row[-3]), int(row[-2]), ahead
