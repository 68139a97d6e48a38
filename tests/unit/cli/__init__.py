"""Tests of hpcstrat/cli."""
