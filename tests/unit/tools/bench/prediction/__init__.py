"""Tests of hpcstrat/tools/bench/prediction."""
