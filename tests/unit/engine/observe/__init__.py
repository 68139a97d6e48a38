"""Tests of hpcstrat/engine/observe."""
