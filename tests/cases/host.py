"""Functions that run on the host."""
