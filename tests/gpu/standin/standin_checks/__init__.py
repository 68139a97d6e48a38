"""Checks of the stand-in; each runs in a process that has the stand-in on its path."""
