"""Tests that reach a module: ``python -m tests.reach hpcstrat/PATH.py`` runs them."""
