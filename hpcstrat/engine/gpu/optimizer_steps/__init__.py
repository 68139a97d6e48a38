"""Steps of optimizers on a GPU: all arrays of a type in one launch."""
