"""Rank tests of hpcstrat/engine/reduction."""
