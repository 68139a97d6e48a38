"""Tests of hpcstrat/engine."""
