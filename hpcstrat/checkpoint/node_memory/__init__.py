"""Snapshots of the objects in the memory of nodes, which outlive the ranks."""
