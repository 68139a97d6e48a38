"""Rank tests of hpcstrat/data/files."""
