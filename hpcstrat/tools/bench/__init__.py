"""Scaling benchmarks for users: measure a launch, store the results, report on many."""
