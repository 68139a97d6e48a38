"""The library's core: sums, gathers and headers, on which the public modules build."""
