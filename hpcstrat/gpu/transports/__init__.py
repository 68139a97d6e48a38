"""How arrays move between the GPUs of all ranks; see `transport_select`."""
