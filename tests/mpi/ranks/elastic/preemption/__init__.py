"""Rank tests of hpcstrat/elastic/preemption."""
