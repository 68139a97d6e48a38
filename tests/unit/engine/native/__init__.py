"""Tests of hpcstrat/engine/native."""
