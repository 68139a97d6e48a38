"""Tests of hpcstrat/tools/doctor."""
