"""Adapters to other libraries, one each, which know nothing of one another."""
