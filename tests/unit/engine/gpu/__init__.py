"""Tests of hpcstrat/engine/gpu."""
