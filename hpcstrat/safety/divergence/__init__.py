"""Comparison of copies that must be equal on all replicas."""
