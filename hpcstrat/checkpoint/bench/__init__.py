"""Trials of how fast a file system writes checkpoints."""
