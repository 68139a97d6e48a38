"""Rank tests of hpcstrat/tools/bench/prediction."""
