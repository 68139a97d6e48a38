"""Tests of hpcstrat/safety/divergence."""
