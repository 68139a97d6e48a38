"""Tests of hpcstrat/checkpoint."""
