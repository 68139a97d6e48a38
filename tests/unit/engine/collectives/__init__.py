"""Tests of hpcstrat/engine/collectives."""
