"""Logical replicas: more replicas than ranks, with results that are the same bits."""
