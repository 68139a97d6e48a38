"""Which checkpoints a folder holds, which stay, and which are removed."""
