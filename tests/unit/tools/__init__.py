"""Tests of hpcstrat/tools."""
