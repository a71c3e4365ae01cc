"""Decorators with the calling conventions of Equinox and of JAX, on the rules of this library."""
