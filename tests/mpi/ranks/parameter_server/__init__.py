"""Rank tests of hpcstrat/parameter_server."""
