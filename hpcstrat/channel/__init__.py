"""What all ranks agree on before each collective call, and how they wait for it."""
