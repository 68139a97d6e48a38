"""How all replicas write one file."""
