"""Tests of hpcstrat/tools/chaos."""
