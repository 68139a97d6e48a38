"""Tests of hpcstrat/safety/watchdog."""
