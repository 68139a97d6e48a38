"""Checks that copies of a variable are equal on all replicas."""
