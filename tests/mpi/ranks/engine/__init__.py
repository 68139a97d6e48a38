"""Rank tests of hpcstrat/engine."""
