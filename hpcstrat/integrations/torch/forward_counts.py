"""Counts of a module's forwards, to find steps that this rank alone has left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hpcstrat.engine.channel.call_state import Position

__all__ = ["ForwardCounts", "tensors_of"]


class ForwardCounts:
    """Counts a module's forwards since the last reduction whose output was not used.

    If a backward fails before it reaches the module, or the program skips it, nothing
    but the forward has happened. Its count shows, in the header of the next reduction,
    that this rank is a step ahead of ranks that have made the backward.
    """

    def __init__(self) -> None:
        self._meetings = 0
        self._restart()

    def _restart(self) -> None:
        # Forwards, and forwards whose output a backward has reached: first those in
        # evaluation mode, then those in training mode.
        self._made, self._used = [0, 0], [0, 0]

    def begin(self, training: bool, position: Position) -> None:
        """Count a forward that begins."""
        if self._meetings != position.num_meetings:
            # The ranks continue from a common point after an error.
            self._meetings = position.num_meetings
            self._restart()
        self._made[training] += 1

    def withdraw(self, training: bool) -> None:
        """Do not count a forward after all: backwards through it cannot be seen."""
        self._made[training] -= 1

    def use(self, training: bool) -> Callable[[], None]:
        """Return a function to call when a backward reaches a forward's output."""
        # The lists are replaced at each restart; later calls then change old lists.
        used, done = self._used, False

        def call() -> None:
            nonlocal done
            used[training] += not done
            done = True

        return call

    def take_unused(self, position: Position) -> int:
        """Return the number of unused forwards, and count from zero again.

        A mode in which no forward was used does not count: a program may evaluate on
        one rank without ``torch.no_grad()``.
        """
        pairs = list(zip(self._made, self._used, strict=True))
        self._restart()
        if self._meetings != position.num_meetings:
            return 0
        return sum(made - used for made, used in pairs if used)


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output: in containers, or attributes of it."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple, Mapping)):
        parts = output.values() if isinstance(output, Mapping) else output
        for part in parts:
            yield from tensors_of(part)
    else:
        # For example a dataclass, or a distribution of torch.distributions.
        attributes = getattr(output, "__dict__", {}).values()
        yield from (one for one in attributes if isinstance(one, torch.Tensor))
