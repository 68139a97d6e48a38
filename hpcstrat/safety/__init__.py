"""Protection of a job against hangs and against silently wrong results."""
