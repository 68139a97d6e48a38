"""Logical replicas: more replicas than ranks, with bitwise reproducible results."""
