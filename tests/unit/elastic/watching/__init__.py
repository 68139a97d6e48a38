"""Tests of hpcstrat/elastic/watching."""
