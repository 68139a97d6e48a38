"""Tests of hpcstrat/engine/logical."""
