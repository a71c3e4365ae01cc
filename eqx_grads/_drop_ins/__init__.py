"""Decorators with the calling conventions of Equinox and JAX, on the rules of this library."""
