"""Implicit functions, fixed points, event times, and functions that run on the host."""
