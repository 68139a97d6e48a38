"""Rank tests of hpcstrat/elastic."""
