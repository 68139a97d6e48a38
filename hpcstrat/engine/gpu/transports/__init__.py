"""Transports that move and sum arrays between GPUs; see `transport_select`."""
