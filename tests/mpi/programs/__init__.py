"""Whole programs that the tests launch on several ranks, and helpers that run them."""
