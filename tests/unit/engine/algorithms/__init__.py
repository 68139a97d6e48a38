"""Tests of hpcstrat/engine/algorithms."""
