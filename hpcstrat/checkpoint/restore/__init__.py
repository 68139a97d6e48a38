"""Matching a checkpoint with the program, and reading it on all replicas."""
