"""Timelines of ranks: files in Chrome's trace event format, and NVTX ranges.

This package does not use MPI: `hpcstrat.engine.observe.clocks` measures the clocks of
other hosts.
"""

from hpcstrat.engine.observe.timeline.recorder import (
    Recorder,
    active,
    recorded_wait,
    trace,
    traced,
)

__all__ = ["Recorder", "active", "recorded_wait", "trace", "traced"]
