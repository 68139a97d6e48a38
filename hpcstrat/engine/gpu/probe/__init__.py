"""Trials of MPI with GPU memory, in processes that may die of them."""
