"""Tests of hpcstrat/testing."""
