"""Management of a folder's checkpoints: listing, keeping and removing files."""
