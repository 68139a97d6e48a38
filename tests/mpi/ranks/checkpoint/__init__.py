"""Rank tests of hpcstrat/checkpoint."""
