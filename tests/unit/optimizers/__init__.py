"""Tests of hpcstrat/optimizers."""
