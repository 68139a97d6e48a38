"""Trials of MPI with GPU memory, in separate processes that may crash."""
