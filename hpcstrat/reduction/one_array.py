"""The reduction of one small array between workers of one replica, at one go.

Right after the system has moved a message, each step of Python takes three times as
long as in a loop, and nested calls most. So what an entry, a plan, an agreement and a
sum do one inside the other is one function here, for the case that nearly all small
calls are; whatever else there is it leaves to them.
"""

from __future__ import annotations

import contextvars
from threading import get_ident
from typing import Any

import numpy as np

from hpcstrat.arrays.recycling import Recycler
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.entries import leave
from hpcstrat.collectives.work import divide
from hpcstrat.reduction.reduction_plan import ReductionPlan
from hpcstrat.typing import Array

__all__ = ["OneArray"]


class OneArray:
    """A reduction that is made again and again, in the header of its call.

    ``what`` is the name of the call, which is planned as an `InlineReduction` of a
    ``single`` array.
    """

    def __init__(
        self,
        what: str,
        planned: ReductionPlan,
        channel: Channel,
        recycler: Recycler,
        timeout_seconds: float | None,
    ) -> None:
        inline: Any = planned.small
        self._what, self._inline, self._channel = what, inline, channel
        self._call, self._divisor = planned.call, planned.divisor
        self._timeout_seconds = timeout_seconds
        self._own = inline.single
        self._first, self._second, *self._further = inline.terms
        self._results, self._recycler = planned.results, recycler
        [(self._shape, self._dtype)] = planned.results
        # Where numbers give no warnings, see `hpcstrat.arrays.casting.quiet`.
        quiet = contextvars.Context()
        quiet.run(np.seterr, all="ignore")
        self._quietly = quiet.run

    def __call__(self, array: Array, out: Any = None) -> Any:
        """Reduce an array, into ``out`` or a new one; None if another way has to.

        An entry, see `hpcstrat.channel.entries`; where it returns None, it is as if it
        had not been called. Collective over ``topology.replica_comm``.
        """
        channel, thread = self._channel, get_ident()
        if out is None:
            [out] = self._recycler.arrays(self._results)
        else:
            fits = out.shape == self._shape and out.dtype == self._dtype
            # In C order, aligned and writable.
            if not fits or not out.flags.carray:
                return None
        if channel.elsewhere is not None or not channel.is_plain():
            return None
        # No other thread runs between the look and the assignment.
        outer = channel.thread
        if outer is not None and outer != thread:
            return None
        entered, channel.thread = channel.num_calls, thread
        try:
            self._own[...] = array
            if channel.swap(self._inline, self._call):
                self._quietly(np.add, self._first, self._second, out)
                for term in self._further:
                    self._quietly(np.add, out, term, out)
                if self._divisor:
                    divide(out, self._divisor)
            else:
                with self._inline.into(out):
                    channel.end_swap(self._inline, self._call, self._timeout_seconds)
        except BaseException as error:
            leave(channel, self._what, error, entered)
            raise
        finally:
            channel.thread = outer
        return out
