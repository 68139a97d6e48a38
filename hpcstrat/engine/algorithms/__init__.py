"""Algorithms for reductions and exchanges of arrays in host memory."""
