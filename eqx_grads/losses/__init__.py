"""Losses whose backward pass keeps less than that of automatic differentiation."""
