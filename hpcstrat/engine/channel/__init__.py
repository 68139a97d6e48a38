"""The channel: headers that ranks compare before each collective call, and waiting."""
