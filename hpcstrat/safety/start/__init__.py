"""Detection of missing ranks while MPI starts and a strategy is created."""
