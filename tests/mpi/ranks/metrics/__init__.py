"""Rank tests of hpcstrat/metrics."""
