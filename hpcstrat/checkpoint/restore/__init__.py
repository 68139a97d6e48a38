"""How a checkpoint is matched with the program and read back on all replicas."""
