"""Timelines, clocks, and statistics of how long replicas waited."""
