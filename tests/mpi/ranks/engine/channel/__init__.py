"""Rank tests of hpcstrat/engine/channel."""
