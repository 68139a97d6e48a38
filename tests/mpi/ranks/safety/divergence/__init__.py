"""Rank tests of hpcstrat/safety/divergence."""
