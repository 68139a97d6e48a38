"""Tests whose functions run on every rank of an MPI job at the same time.

The files are named ``check_*.py``, so that a pytest outside of a job ignores them.
"""
