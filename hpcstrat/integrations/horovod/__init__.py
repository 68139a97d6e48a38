"""Replacements for Horovod's modules: a program changes only its import line."""
