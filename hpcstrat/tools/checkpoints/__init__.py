"""Commands that look at checkpoints."""
