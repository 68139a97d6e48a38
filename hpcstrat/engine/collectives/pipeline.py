"""Algorithms side by side, so that the wire has something to carry at any time."""

from __future__ import annotations

from collections import deque

from hpcstrat.engine.channel.waitable import Waitable, WaitSteps

__all__ = ["Pipeline"]

_MOST_UNDER_WAY = 4


class _Flow(Waitable):
    """One algorithm; has come when it has ended."""

    def __init__(self, steps: WaitSteps, pipeline: Pipeline) -> None:
        self._steps, self._pipeline = steps, pipeline
        # Number of steps that it has begun, and what it waits for; None at its end.
        self.num_begun = 0
        self.awaited: Waitable | None = None
        self.begin_step()

    def begin_step(self) -> None:
        self.awaited = next(self._steps, None)
        self.num_begun += 1

    def agreed(self) -> bool:
        """Whether it has ended; takes all of them further."""
        self._pipeline.advance()
        return self.awaited is None


class Pipeline:
    """Algorithms under way, which take the same steps on all ranks.

    A step is begun by each of them in the order in which they were begun: messages of
    one kind then are in the same order on all ranks, however fast these are.
    """

    def __init__(self) -> None:
        self._flows: deque[_Flow] = deque()

    def add(self, steps: WaitSteps) -> WaitSteps:
        """Begin one, after the end of the oldest where enough are under way."""
        if len(self._flows) == _MOST_UNDER_WAY:
            yield self._flows[0]
        self.begin(steps)

    def end(self) -> WaitSteps:
        """Wait for the end of all."""
        yield from tuple(self._flows)

    def begin(self, steps: WaitSteps) -> Waitable:
        """Begin one, and return what comes when it ends."""
        self.advance()
        flow = _Flow(steps, self)
        self._flows.append(flow)
        return flow

    def advance(self) -> None:
        """Take all of them as far as they come without waiting."""
        before = None
        for flow in self._flows:
            while flow.awaited is not None and flow.awaited.agreed():
                if before is not None and flow.num_begun >= before.num_begun:
                    break
                flow.begin_step()
            if flow.awaited is not None:
                before = flow
        while self._flows and self._flows[0].awaited is None:
            self._flows.popleft()
