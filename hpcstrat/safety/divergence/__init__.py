"""Whether copies that must be equal on all replicas are."""
