"""The ranks of a job as replicas, workers and hosts; the start and the end of MPI."""
