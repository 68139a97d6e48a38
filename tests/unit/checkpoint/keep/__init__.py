"""Tests of hpcstrat/checkpoint/keep."""
