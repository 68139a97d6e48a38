"""Reports about late ranks, and the end of jobs that make no progress."""
