"""Rank tests of hpcstrat/engine/observe."""
