"""Sums, gathers and agreements between ranks, on which all that users import stands."""
