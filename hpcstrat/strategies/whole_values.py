"""Calls between replicas of several ranks, which check that values are whole.

A value that leaves a replica must be equal, bit for bit, on all ranks of the replica:
then the ranks at each position of all replicas compute the same result. A sum inside of
a replica that the program has forgotten is found in this way.
"""

from __future__ import annotations

from typing import Any

from hpcstrat.engine.algorithms.plan import repeat_nothing
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.typing import Tree
from hpcstrat.strategies.inside import Inside

__all__ = ["WholeCollectives"]


class WholeCollectives(Collectives):
    """The calls among the ranks at one position of all replicas.

    Before each reduction and gather, the ranks of the replica compare their values, see
    `Inside.require_whole`. In `Inside.divided` blocks they do not. A broadcast sends
    the values of the first rank of a replica, and a barrier waits for all ranks.
    """

    def __init__(
        self, channel: Channel | None, ops: Any, options: Any, inside: Inside
    ) -> None:
        super().__init__(channel, ops, options)
        self._inside = inside
        self._reduce, self._start = self.reduce_in_call, self.start_in_call
        self._gather, self._start_gather = self.all_gather, self.start_all_gather
        self._send, self._wait = self.broadcast, self.barrier
        # The kernel cannot repeat these calls, because values are compared before.
        self.repeat = repeat_nothing
        self.repeat_gather = repeat_nothing
        self.reduce_in_call = self._reduce_whole
        self.batch_reduce = self._batch_reduce_whole
        self.start_in_call = self._start_whole
        self.start_reduce = self._start_reduce_whole
        self.all_gather = self._gather_whole
        self.start_all_gather = self._start_gather_whole
        self.broadcast = self._broadcast_whole
        self.barrier = self._barrier_of_all

    def _reduce_whole(
        self, op: Any, trees: Tree, what: str, options: Any = None, **more: Any
    ) -> Tree:
        self._inside.require_whole(what, trees)
        return self._reduce(op, trees, what, options, **more)

    def _start_whole(
        self, op: Any, trees: Tree, what: str, options: Any = None, **more: Any
    ) -> Any:
        self._inside.require_whole(what, trees)
        return self._start(op, trees, what, options, **more)

    _batch_reduce_whole = collective(_reduce_whole)
    _start_reduce_whole = collective(_start_whole)

    @collective
    def _gather_whole(self, tree: Tree, axis: int, what: str) -> Tree:
        self._inside.require_whole(what, tree)
        return self._gather(tree, axis, what)

    def _start_gather_whole(self, tree: Tree, axis: int, what: str) -> Any:
        self._inside.require_whole(what, tree)
        return self._start_gather(tree, axis, what)

    @collective
    def _broadcast_whole(self, tree: Tree, root: int, what: str) -> Tree:
        """Send the values of the root replica's first rank to all ranks."""
        if not self._inside.is_divided:
            tree = self._inside.collectives.broadcast(tree, 0, f"{what} inside")
        return self._send(tree, root, what)

    @collective
    def broadcast_object(self, value: Any, root: int, what: str) -> Any:
        """Send the object of the root replica's first rank to all ranks."""
        if not self._inside.is_divided:
            inside = self._inside.collectives
            value = inside.broadcast_object(value, 0, f"{what} inside")
        return super().broadcast_object(value, root, what)

    def _barrier_of_all(self, what: str = "barrier") -> None:
        """Wait for the ranks at this position, which then wait for their replicas."""
        self._wait(what)
        self._inside.collectives.barrier(what)
