"""Programs of jobs with frameworks."""
