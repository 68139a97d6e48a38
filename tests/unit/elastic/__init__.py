"""Tests of hpcstrat/elastic."""
