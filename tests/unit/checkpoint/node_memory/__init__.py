"""Tests of hpcstrat/checkpoint/node_memory."""
