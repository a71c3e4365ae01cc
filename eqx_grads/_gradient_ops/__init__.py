"""Identities whose derivative is not the identity, and `zero_safe` derivatives of functions."""
