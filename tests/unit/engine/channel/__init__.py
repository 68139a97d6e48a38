"""Tests of hpcstrat/engine/channel."""
