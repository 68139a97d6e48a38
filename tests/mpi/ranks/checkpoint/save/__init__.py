"""Rank tests of hpcstrat/checkpoint/save."""
