"""Checkpoints on disk: one run directory, one file system interface, one atomic commit."""
