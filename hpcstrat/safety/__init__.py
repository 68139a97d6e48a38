"""Protection of a job against hangs, and against results that are silently wrong."""
