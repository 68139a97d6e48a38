"""What MPI can do with GPU memory, tried in processes that may die of it."""
