"""Faults for the library, and a runner that looks which test finds each of them."""
