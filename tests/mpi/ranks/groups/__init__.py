"""Rank tests of hpcstrat/groups."""
