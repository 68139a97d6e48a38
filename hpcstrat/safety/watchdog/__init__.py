"""Watchdog: reports late ranks, and ends a job that makes no progress."""
