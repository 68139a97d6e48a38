"""The ranks of a job as replicas, workers and hosts, and the start and end of MPI."""
