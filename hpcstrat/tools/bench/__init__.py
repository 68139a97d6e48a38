"""Scaling benchmarks for users: measure a launch, store the figures, report on runs."""
