"""Scans, branches, loops and rematerialization, with a chosen backward pass."""
