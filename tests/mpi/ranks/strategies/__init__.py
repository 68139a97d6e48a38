"""Rank tests of hpcstrat/strategies."""
