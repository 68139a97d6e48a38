"""The tools of the command ``hpcstrat``: doctor, bench, chaos and others."""
