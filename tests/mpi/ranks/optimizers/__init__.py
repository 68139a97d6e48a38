"""Rank tests of hpcstrat/optimizers."""
