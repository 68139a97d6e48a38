"""Tests of hpcstrat/cluster_resolver."""
