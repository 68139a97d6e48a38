"""Tests of hpcstrat/metrics."""
