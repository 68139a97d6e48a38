"""Tests of hpcstrat/tools/checkpoints."""
