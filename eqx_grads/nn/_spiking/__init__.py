"""Spiking neurons."""
