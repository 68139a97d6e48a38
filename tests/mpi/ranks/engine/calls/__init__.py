"""Rank tests of hpcstrat/engine/calls."""
