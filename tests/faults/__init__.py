"""Programs and libraries that cause faults, for tests in all folders."""
