"""Rank tests of hpcstrat/checkpoint/restore."""
