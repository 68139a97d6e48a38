"""Programs of Horovod as they are, but for the line that imports it."""
