"""Tests of hpcstrat/engine/reduction."""
