"""The agreement of all ranks before each collective call, and the waiting for it."""
