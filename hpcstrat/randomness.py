"""Random numbers: a stream for each replica, and a stream that all replicas share.

All streams use Philox4x64-10, a counter-based generator (Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405). NumPy's SeedSequence computes each stream's
key from the seed, the name, the replica and the generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.context import own_index
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import CollectiveError

_BIT_GENERATOR = "Philox"
_NUM_WORDS = 12
"""Words of a saved stream: the generation in which it began (1), key (2), counter (4),
buffer (4), and a last word. Bits 0 to 7 of the last word are the position in the
buffer, bit 8 is set if half of a drawn word is unused, bits 32 to 63 are that half."""

# The largest 32-bit word, which is never the number of a replica.
_SHARED = 2**32 - 1
"""Used instead of a replica's number in the key of the shared stream."""


class RandomStreams:
    """The random streams of one name; made by ``Strategy.random``.

    A `CheckpointManager` can save this object. A restore on the same number of replicas
    continues the streams bit for bit. If the number of replicas has changed, each
    replica with a saved stream continues it, and additional replicas get new, unused
    streams. A restore does not replace the generator objects.

    Parameters
    ----------
    strategy : Strategy
        The strategy whose replicas use the streams.
    name : str
        Name of the streams; streams of different names are independent.
    seed : int
        Seed of the streams; at least 0, below 2**63.

    Attributes
    ----------
    generation : int
        Number of restores so far that have changed the number of replicas.

    Raises
    ------
    ValueError
        If the seed is not an integer in this range, or the name is not a str.
    """

    checkpoint_section = "rng"

    def __init__(self, strategy: Replicas, name: str, seed: int = 0) -> None:
        self.name = name
        self.seed = _checked(name, seed)
        self.generation = 0
        self._strategy = strategy
        self._stream = _words_of(name)
        # For each replica of this process, the generation in which its stream began.
        replicas = strategy.local_replicas
        self._births = [0 for _ in replicas]
        # Generators are made with a key, not with a SeedSequence, because
        # SeedSequence.spawn() counts its children, and this count is not saved.
        self._own = [self._new(0, replica) for replica in replicas]
        self._shared = [self._new(0, _SHARED) for _ in replicas]

    @property
    def distribute_strategy(self) -> Any:
        """The strategy whose replicas use the streams."""
        return self._strategy

    @property
    def generator(self) -> np.random.Generator:
        """This replica's own numpy.random.Generator.

        With one seed, its numbers are the same in every run, on any number of replicas.
        """
        return self._own[own_index() or 0]

    def generator_of(self, index: int) -> np.random.Generator:
        """Return a replica's own generator; ``index`` counts this process's replicas.

        For the library's own modules."""
        return self._own[index]

    @property
    def shared(self) -> np.random.Generator:
        """A numpy.random.Generator that returns the same numbers on all replicas.

        All replicas must call its methods in the same order, or the streams differ."""
        return self._shared[own_index() or 0]

    def _new(self, birth: int, replica: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key(birth, replica)))

    def _key(self, birth: int, replica: int) -> Array:
        # All these lists have the same length, and words below 2**32: SeedSequence then
        # has different results for different lists.
        place = (*self._stream, birth, replica)
        return np.random.SeedSequence(self.seed, spawn_key=place).generate_state(
            2, np.uint64
        )

    def state(self) -> dict[str, Any]:
        """Return the state of all replicas' streams.

        Collective over the strategy's replicas.

        Returns
        -------
        dict of str to object
            ``bit_generator``, ``root_entropy`` (the seed), ``generation``, ``state``
            (uint64 of shape (num_replicas, 12)) and ``shared`` (uint64 of shape (12,));
            the same on every replica.

        Raises
        ------
        CollectiveError
            If replicas have made different calls on ``shared``. On every replica.
        """
        # The shared stream is gathered, too, to check that it is equal on all replicas.
        rows = [self._packed(index) for index in range(len(self._own))]
        both = self._strategy.collectives.all_gather(
            np.stack(rows), 0, f"state of the random streams {self.name!r}"
        )
        own, shared = both[:, 0], both[:, 1]
        others = np.flatnonzero((shared != shared[0]).any(axis=1))
        if others.size:
            raise CollectiveError(
                "expected all replicas to draw the same numbers from "
                f"{self.name!r}.shared, found another position on replicas "
                f"{others.tolist()} than on replica 0; draw from generator if replicas "
                "draw differently",
                others.tolist(),
            )
        return {
            "bit_generator": _BIT_GENERATOR,
            "root_entropy": self.seed,
            "generation": self.generation,
            # Both results are copied, because a view would keep ``both`` alive.
            "state": np.ascontiguousarray(own),
            "shared": shared[0].copy(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a saved state belongs to streams with this seed and name.

        Not collective.

        Parameters
        ----------
        state : dict of str to object
            Result of `state`, saved on any number of replicas.

        Raises
        ------
        ValueError
            If the state belongs to streams of another seed or name.
        """
        if state["bit_generator"] != _BIT_GENERATOR:
            raise ValueError(
                f"expected the state of {_BIT_GENERATOR}, found that of "
                f"{state['bit_generator']}; restore it with the library that saved it"
            )
        if int(state["root_entropy"]) != self.seed:
            raise ValueError(
                f"expected the state of seed {self.seed}, found that of seed "
                f"{int(state['root_entropy'])}; use the seed that was saved"
            )
        rows, shared = np.asarray(state["state"]), np.asarray(state["shared"])
        if rows.shape[1:] != (_NUM_WORDS,) or shared.shape != (_NUM_WORDS,):
            raise ValueError(
                f"expected {_NUM_WORDS} words for each stream, found shapes "
                f"{rows.shape} and {shared.shape}; restore an older checkpoint"
            )
        # The key is compared instead of the name, which is not saved.
        if not np.array_equal(shared[1:3], self._key(0, _SHARED)):
            raise ValueError(
                f"expected the state of the streams {self.name!r}, found that of "
                "another name; use the name that was saved"
            )

    def restore_state(self, state: dict[str, Any]) -> None:
        """Continue the streams from a saved state.

        Not collective: call it on every replica with the same state.

        Parameters
        ----------
        state : dict of str to object
            Result of `state`, saved on any number of replicas.

        Raises
        ------
        ValueError
            If the state has another seed or name; nothing is changed.
        """
        self.check_state(state)
        rows = np.asarray(state["state"])
        # If the number of replicas has changed, new streams use the next generation in
        # their keys, so that they do not repeat streams of an earlier restore.
        changed = len(rows) != self._strategy.num_replicas_in_sync
        replicas = self._strategy.local_replicas
        own = [rows[r] if r < len(rows) else None for r in replicas]
        self.restore_own_state(state, own, changed=changed)

    def own_state(self) -> dict[str, Any]:
        """Return the same dict as `state`, but with only this process's replicas.

        For the library's own modules."""
        return {
            "bit_generator": _BIT_GENERATOR,
            "root_entropy": self.seed,
            "generation": self.generation,
            "state": np.stack([self._packed(i)[0] for i in range(len(self._own))]),
            "shared": _pack(self._shared[0], 0),
        }

    def _packed(self, index: int) -> Array:
        """Return a local replica's own and shared stream, each packed by `_pack`."""
        own = _pack(self._own[index], self._births[index])
        return np.stack([own, _pack(self._shared[index], 0)])

    def restore_own_state(
        self, state: dict[str, Any], rows: Sequence[Array | None], *, changed: bool
    ) -> None:
        """Continue the streams of this process's replicas from saved states.

        ``rows`` has a saved state for each of these replicas, or None for a new stream.
        Every replica must pass the same ``shared`` and ``generation`` in ``state``. For
        the library's own modules.
        """
        self.check_state(state)
        self.generation = int(state["generation"]) + changed
        replicas = self._strategy.local_replicas
        for index, (replica, row) in enumerate(zip(replicas, rows, strict=True)):
            # The program may hold a reference to the generator: change it in place.
            if row is not None:
                birth = _unpack(np.asarray(row), self._own[index])
            else:
                birth = self.generation
                fresh = np.random.Philox(key=self._key(birth, replica))
                self._own[index].bit_generator.state = fresh.state
            self._births[index] = birth
        for shared in self._shared:
            _unpack(np.asarray(state["shared"]), shared)

    def __repr__(self) -> str:
        return f"RandomStreams({self.name!r}, seed={self.seed})"


def _checked(name: Any, seed: Any) -> int:
    if not isinstance(name, str):
        raise ValueError(
            f"expected text as the name of random streams, found {name!r}; name them"
        )
    # bool is a subclass of int, but a seed of True is a mistake.
    whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 2**63:
        raise ValueError(
            f"expected an integer 0 <= seed < 2**63, found {seed!r}; choose another"
        )
    return int(seed)


def _words_of(name: str) -> tuple[int, ...]:
    """Return four words below 2**32 that identify a name, equal on every machine."""
    # hash() is not used, because its results differ between processes.
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    # Little-endian words, because another machine may restore a checkpoint.
    return tuple(int(word) for word in np.frombuffer(digest, "<u4"))


def _pack(generator: np.random.Generator, birth: int) -> Array:
    """Return a generator's state as 12 words; the first is the stream's generation."""
    state: Any = generator.bit_generator.state
    # The last word has the position in the buffer, and an unused half of a drawn word.
    rest = state["buffer_pos"] | state["has_uint32"] << 8 | state["uinteger"] << 32
    key, counter = state["state"]["key"], state["state"]["counter"]
    return np.array([birth, *key, *counter, *state["buffer"], rest], np.uint64)


def _unpack(words: Array, generator: np.random.Generator) -> int:
    """Set a generator to a state from `_pack`; return the stream's generation."""
    words = words.astype(np.uint64)
    rest = int(words[11])
    generator.bit_generator.state = {
        "bit_generator": _BIT_GENERATOR,
        "state": {"key": words[1:3], "counter": words[3:7]},
        "buffer": words[7:11],
        "buffer_pos": rest & 0xFF,
        "has_uint32": rest >> 8 & 1,
        "uinteger": rest >> 32,
    }
    return int(words[0])
