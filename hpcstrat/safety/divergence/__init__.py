"""Checks that the copies of each mirrored variable are equal on all replicas."""
