"""Tests of hpcstrat/engine/topology."""
