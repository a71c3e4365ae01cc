"""Sizes that are unknown while tracing, as `jax.export.symbolic_shape` makes them.

JAX can't compare such a size with a number. So where a size only decides how fast something
runs, choose as for a `likely` size; where it decides what is computed, do what works for any.
"""

from typing import Any, TypeAlias


# An integer or, while a program is exported, a symbolic size, which has no public class.
Size: TypeAlias = Any


def is_symbolic(size: Size) -> bool:
    return not isinstance(size, int)


def size_or(size: Size, likely: int) -> int:
    """`size`, or the `likely` one if it is symbolic: for a choice of speed only."""
    return likely if is_symbolic(size) else size


def as_length(size: Size) -> int | None:
    """`size` as the argument `length` of `jax.lax.scan`, which finds a symbolic one in `xs`."""
    return None if is_symbolic(size) else size
