"""Tests of hpcstrat; plain ``pytest`` runs all tests that the machine can run."""
