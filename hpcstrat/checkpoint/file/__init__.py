"""The format of checkpoint files, with functions to read and check them."""
