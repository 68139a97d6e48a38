"""Several sums that run at the same time, so that the network stays busy."""

from __future__ import annotations

from collections import deque

from hpcstrat.engine.channel.waitable import Waitable, WaitSteps

__all__ = ["ConcurrentSums"]

_MOST_UNDER_WAY = 4


class _Flow(Waitable):
    """One of several sums, as a `Waitable` that waits for its end."""

    def __init__(self, steps: WaitSteps, sums: ConcurrentSums) -> None:
        self._steps, self._sums = steps, sums
        # Number of steps begun, and the `Waitable` awaited now (None at the end).
        self.num_begun = 0
        self.awaited: Waitable | None = None
        self.begin_step()

    def begin_step(self) -> None:
        self.awaited = next(self._steps, None)
        self.num_begun += 1

    def agreed(self) -> bool:
        """Advance all algorithms; return whether this algorithm has ended."""
        self._sums.advance()
        return self.awaited is None


class ConcurrentSums:
    """Runs several algorithms together, each with the same steps on all ranks.

    An algorithm begins its step ``n`` only after all earlier algorithms have begun
    their step ``n``. So messages with the same tag are started in the same order on all
    ranks, even if some ranks are faster.
    """

    def __init__(self) -> None:
        self._flows: deque[_Flow] = deque()

    def add(self, steps: WaitSteps) -> WaitSteps:
        """Begin an algorithm; if four are under way, wait for the oldest one first."""
        if len(self._flows) == _MOST_UNDER_WAY:
            yield self._flows[0]
        self.begin(steps)

    def end(self) -> WaitSteps:
        """Wait for the end of all algorithms."""
        yield from tuple(self._flows)

    def begin(self, steps: WaitSteps) -> Waitable:
        """Begin an algorithm, and return a `Waitable` that waits for its end."""
        self.advance()
        flow = _Flow(steps, self)
        self._flows.append(flow)
        return flow

    def advance(self) -> None:
        """Advance all algorithms as far as possible without waiting."""
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
