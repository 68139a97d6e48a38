"""Rank tests of hpcstrat/variables."""
