"""Tests of hpcstrat/layers."""
