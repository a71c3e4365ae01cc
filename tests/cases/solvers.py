"""Implicit functions and fixed points."""
