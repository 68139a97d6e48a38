"""Tests of hpcstrat/safety."""
