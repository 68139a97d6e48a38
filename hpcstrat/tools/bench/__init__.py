"""Scaling benchmarks for users: measure a launch, keep the figures, report on many."""
