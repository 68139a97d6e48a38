"""Rank tests of hpcstrat/engine/arrays."""
