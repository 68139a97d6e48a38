"""The reduction of one small array, from the program's call to the agreement.

Nearly all small calls are alike: an array, the usual options, nothing under way. What
an entry, a plan and the choice of a way do one inside the other costs more than the
exchange itself, and three times as much right after the system has moved a message. So
it is one function here; whatever else there is it leaves to them.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from hpcstrat.arrays.recycling import Recycler
from hpcstrat.channel.channel import Channel
from hpcstrat.channel.entries import leave
from hpcstrat.observe.timeline import active
from hpcstrat.reduction.reduction_plan import ReductionPlan
from hpcstrat.typing import Array

__all__ = ["OneArray"]


class OneArray:
    """A reduction that is made again and again.

    ``what`` is the name of the call, which is planned with a ``small`` reduction of a
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
        small: Any = planned.small
        self._what, self._call, self._channel = what, planned.call, channel
        self._reduce, self._timeout_seconds = small.reduce_one, timeout_seconds
        self._results, self._recycler = planned.results, recycler
        [(self._shape, self._dtype)] = planned.results

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
        # As `Channel.is_plain`, whose call alone takes a tenth of the time.
        if (
            channel.broken
            or channel.closed
            or channel.started
            or channel.notice
            or channel.elsewhere is not None
            or channel.sections.failure is not None
            or active.recorder is not None
        ):
            return None
        # No other thread runs between the look and the assignment.
        outer = channel.thread
        if outer is not None and outer != thread:
            return None
        entered, channel.thread = channel.num_calls, thread
        try:
            self._reduce(array, out, self._call, self._timeout_seconds)
        except BaseException as error:
            leave(channel, self._what, error, entered)
            raise
        finally:
            channel.thread = outer
        return out
