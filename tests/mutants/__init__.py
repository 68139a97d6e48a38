"""Faults to plant in the library, and a runner that reports which test finds each."""
