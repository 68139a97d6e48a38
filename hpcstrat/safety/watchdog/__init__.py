"""Who is late, where, and since when; the end of jobs that do not go on."""
