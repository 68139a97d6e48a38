"""Saving: all replicas together write one checkpoint file."""
