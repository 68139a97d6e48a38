"""Rank tests of hpcstrat/checkpoint/keep."""
