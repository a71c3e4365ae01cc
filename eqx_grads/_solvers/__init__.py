"""Implicit functions, fixed points and event times."""
