"""Timelines, clock offsets, and statistics of the time that replicas waited."""
