"""Rank tests of the integrations: ``python -m tests.mpi.ranks FILES``."""
