"""Fuzzer: random programs, run on ranks, and compared with an oracle."""
