"""Writing one file by all replicas together."""
