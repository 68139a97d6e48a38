"""Tests of hpcstrat/elastic/preemption."""
