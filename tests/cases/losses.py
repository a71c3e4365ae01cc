"""Losses with gradients formed chunk by chunk."""
