"""Rank tests of hpcstrat/engine/algorithms."""
