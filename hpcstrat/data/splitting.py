"""Cuts global batches for replicas, by the two rules of tf.distribute.

*Pieces*: every batch is cut by itself, into pieces of ``ceil(length / replicas)`` rows.
Where all workers read the same batches, each takes the pieces of its own replicas;
where each reads its own, it gives all pieces to its replicas, one after the other.
*Slots*: the declared batch size gives each replica a slot, the first ones a row more
where it does not divide; all rows are one stream that is poured into the slots.

The iterators go on after an element whose making or cutting raised, if the program's
own iterator does; nothing but that element is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from hpcstrat.data.batches import (
    as_batch,
    batch_length,
    empty_like,
    own_array,
    pieces_of,
    rows_of,
)
from hpcstrat.engine.arrays.kinds import array_module
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Tree

__all__ = ["deal_elements", "deal_pieces", "pour_slots", "slot_sizes"]


def slot_sizes(batch_size: int, num_replicas: int) -> list[int]:
    """Return the rows of each replica's slot, which add up to ``batch_size``."""
    low, more = divmod(batch_size, num_replicas)
    return [low + (replica < more) for replica in range(num_replicas)]


def pour_slots(
    batches: Iterable[Tree],
    batch_size: int,
    num_replicas: int,
    replicas: Sequence[int],
) -> Iterator[list[Tree]]:
    """Pour all rows, as one stream, into the replicas' slots.

    The worker begins with the slot of the first of its replicas, and then uses every
    slot of the cycle itself. Each step has one batch per replica of the worker; it
    raises ValueError for scalars, and arrays of different lengths.
    """
    sizes = slot_sizes(batch_size, num_replicas)
    return _SlotPieces(_Stream(batches), sizes, replicas[0], len(replicas))


class _SlotPieces(Iterator[list[Tree]]):
    """The iterator of `pour_slots`."""

    def __init__(
        self, stream: _Stream, sizes: Sequence[int], first: int, count: int
    ) -> None:
        self._stream = stream
        self._sizes = sizes
        self._slot = first
        self._count = count

    def __next__(self) -> list[Tree]:
        slots = range(self._slot, self._slot + self._count)
        sizes = [self._sizes[slot % len(self._sizes)] for slot in slots]
        # After an error the rows that have come are still there for the next step.
        # Slots without rows ask for none: a last step may be empty on all workers.
        if not self._stream.fill(sum(sizes)):
            raise StopIteration
        self._slot += self._count
        return [self._stream.take(size) for size in sizes]


class _Stream:
    """The rows of batches, one behind the other."""

    def __init__(self, batches: Iterable[Tree]) -> None:
        self._batches = iter(batches)
        self._parts: deque[tuple[Tree, int, int]] = deque()
        self._last: Tree = None
        self._num_rows = 0

    def fill(self, count: int) -> bool:
        """Have as many rows to take, if there are; return whether to go on.

        That is where there are any, or none are wanted and their form is known.
        """
        wanted = count if self._last is not None else max(1, count)
        while self._num_rows < wanted:
            element = next(self._batches, _END)
            if element is _END:
                break
            # A pipeline may fill the same buffer again.
            batch = tree_map(own_array, element)
            length = batch_length(batch)
            self._last = batch
            if length:
                self._parts.append((batch, 0, length))
                self._num_rows += length
        return self._num_rows > 0 or wanted == 0

    def take(self, count: int) -> Tree:
        """Take up to ``count`` rows; fewer only at the end."""
        first = self._parts[0][0] if self._parts else self._last
        # Begins with no rows of the right form, should there be none to take.
        parts = [rows_of(first, 0, 0)]
        while count > 0 and self._parts:
            batch, start, length = self._parts.popleft()
            stop = min(start + count, length)
            parts.append(rows_of(batch, start, stop))
            count -= stop - start
            self._num_rows -= stop - start
            if stop < length:
                self._parts.appendleft((batch, stop, length))
        return parts[-1] if len(parts) < 3 else _concatenated(parts)


_END = object()


def _concatenated(parts: list[Tree]) -> Tree:
    structure = flatten(parts[0])[1]
    columns = zip(*(flatten(part)[0] for part in parts), strict=True)
    return unflatten(
        structure,
        [array_module(column[0]).concatenate(column) for column in columns],
    )


def deal_elements(elements: Iterable[Tree], count: int) -> Iterator[list[Tree]]:
    """Give successive elements to the ``count`` replicas of a worker.

    A last step is filled with batches without rows, and left out where elements are
    scalars.
    """
    return _DealtPieces(elements, count)


def deal_pieces(
    batches: Iterable[Tree], num_replicas: int, count: int
) -> Iterator[list[Tree]]:
    """Cut every batch by itself, and give successive pieces to successive replicas.

    There are ``num_replicas`` pieces, those of all workers, for the ``count`` replicas
    of this one; a step raises ValueError for scalars, and arrays of different lengths.
    """
    return _DealtPieces(_Pieces(batches, num_replicas), count)


class _Pieces(Iterator[Tree]):
    """All pieces of all batches, one behind the other."""

    def __init__(self, batches: Iterable[Tree], num_replicas: int) -> None:
        self._batches = iter(batches)
        self._num_replicas = num_replicas
        self._ready: deque[Tree] = deque()

    def __next__(self) -> Tree:
        if not self._ready:
            count = self._num_replicas
            batch = as_batch(next(self._batches))
            self._ready.extend(pieces_of(batch, count, range(count)))
        return self._ready.popleft()


class _DealtPieces(Iterator[list[Tree]]):
    """The iterator of `deal_elements`."""

    def __init__(self, elements: Iterable[Tree], count: int) -> None:
        self._elements = iter(elements)
        self._count = count
        self._step: list[Tree] = []

    def __next__(self) -> list[Tree]:
        while len(self._step) < self._count:
            element = next(self._elements, _END)
            if element is _END:
                break
            # A pipeline may fill the same buffer again.
            self._step.append(tree_map(own_array, element))
        # Kept so far in the object: after an error the next step has what had come.
        step, self._step = self._step, []
        if len(step) == self._count:
            return step
        # Replicas without an element take part in the step: the others reduce in it.
        empty = empty_like(step[0]) if step else None
        if empty is None:
            raise StopIteration
        return step + [empty] * (self._count - len(step))
