"""Tests of hpcstrat/strategies."""
