"""Rank tests of hpcstrat/testing."""
