"""Norms, the semiring of logarithms, and decompositions, with finite derivatives."""
