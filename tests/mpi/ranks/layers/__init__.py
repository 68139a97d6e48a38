"""Rank tests of hpcstrat/layers."""
