"""Tests of hpcstrat/engine/arrays."""
