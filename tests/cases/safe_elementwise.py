"""Elementwise mathematics with finite derivatives."""
