"""Rank tests of hpcstrat/checkpoint/node_memory."""
