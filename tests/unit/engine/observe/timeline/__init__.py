"""Tests of hpcstrat/engine/observe/timeline."""
