"""Protection of a job against hanging, and against being silently wrong."""
