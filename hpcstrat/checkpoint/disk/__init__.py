"""Files and folders at the level of the operating system, and their speed."""
