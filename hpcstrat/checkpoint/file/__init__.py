"""The format of a checkpoint file, and how it is read and checked."""
