"""Detection of ranks that are missing when MPI starts, or a strategy is created."""
