"""Reductions and gathers of arrays, messages, and calls that send Python objects."""
