"""Fuzzer of single calls: random sequences, each result compared with NumPy."""
