"""Rank tests of hpcstrat/engine/collectives."""
