"""The tests of tests/mpi/ranks with arrays on GPUs in place of NumPy's."""
