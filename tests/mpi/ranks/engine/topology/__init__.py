"""Rank tests of hpcstrat/engine/topology."""
