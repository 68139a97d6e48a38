"""Rank tests of hpcstrat/engine/logical."""
