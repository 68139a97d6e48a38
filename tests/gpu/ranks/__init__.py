"""The tests of tests/mpi/ranks with arrays on GPUs instead of NumPy arrays."""
