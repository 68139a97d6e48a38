"""Values of checkpoints in files of other programs, and theirs in checkpoints."""
