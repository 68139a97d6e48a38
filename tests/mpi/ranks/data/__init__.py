"""Rank tests of hpcstrat/data."""
