"""The commands ``hpcstrat ckpt`` and ``hpcstrat verify-bits``."""
