"""Reductions of host memory: functions over one flat buffer of one type."""
