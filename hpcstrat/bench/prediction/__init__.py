"""How fast a training step will be on many nodes, simulated by SimGrid."""
