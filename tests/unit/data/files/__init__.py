"""Tests of hpcstrat/data/files."""
