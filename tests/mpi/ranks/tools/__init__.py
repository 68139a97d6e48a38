"""Rank tests of hpcstrat/tools."""
