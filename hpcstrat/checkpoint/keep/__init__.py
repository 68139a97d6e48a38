"""The checkpoints of a folder: those that are there, stay, or are removed."""
