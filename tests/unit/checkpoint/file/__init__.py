"""Tests of hpcstrat/checkpoint/file."""
