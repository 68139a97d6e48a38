"""Tests of hpcstrat/data."""
