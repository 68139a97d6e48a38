"""Rank tests of hpcstrat/safety."""
