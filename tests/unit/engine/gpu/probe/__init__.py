"""Tests of hpcstrat/engine/gpu/probe."""
