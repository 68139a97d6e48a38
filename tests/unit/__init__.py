"""Serial tests, which never start MPI in the test process."""
