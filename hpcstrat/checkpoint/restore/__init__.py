"""Matching of a checkpoint with the program's variables, and reading on all ranks."""
