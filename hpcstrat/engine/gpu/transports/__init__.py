"""Transports of arrays between the GPUs of all ranks; see `transport_select`."""
