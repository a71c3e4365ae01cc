"""Quantizers, and layers with few bits."""
