"""Reports late ranks, and ends jobs that do not go on."""
