"""Tools around the library, each with its command: doctor, bench, chaos and others."""
