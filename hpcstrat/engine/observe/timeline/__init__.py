"""Timelines of ranks: files in Chrome's trace event format, and NVTX ranges.

Nothing here knows MPI: the clocks of other hosts are measured in
`hpcstrat.engine.observe.clocks`.
"""

from hpcstrat.engine.observe.timeline.ranges import recorded_wait, trace, traced
from hpcstrat.engine.observe.timeline.recorder import Recorder, active

__all__ = ["Recorder", "active", "recorded_wait", "trace", "traced"]
