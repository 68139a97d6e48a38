"""Arrays: their kinds and libraries, shared memory between them, and packing."""
