"""Tests of hpcstrat/engine/calls."""
