"""Which way of writing is fastest on a file system: several are tried there."""
