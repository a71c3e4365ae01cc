"""Identities whose derivative is not the identity."""
