"""Tests of hpcstrat/safety/start."""
