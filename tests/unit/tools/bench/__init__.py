"""Tests of hpcstrat/tools/bench."""
