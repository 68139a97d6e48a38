"""Whole programs drawn from seeds, run on ranks, and judged by a plain oracle."""
