"""Checks of the stand-in, each for a process of its own that has it on its path."""
