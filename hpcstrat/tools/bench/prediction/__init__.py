"""Prediction of the time of a training step on many nodes, simulated by SimGrid."""
