"""Programs and libraries that make things go wrong, for the tests of all folders."""
