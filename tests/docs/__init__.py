"""Tests of the documentation: its code blocks, its diff, its lists of names."""
