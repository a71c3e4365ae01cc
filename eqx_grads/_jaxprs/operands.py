"""A part of some operands: a list of them, and indices."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def at(values: Sequence[Any], indices: Iterable[int]) -> list[Any]:
    return [values[i] for i in indices]


def fill(values: Sequence[Any], indices: Iterable[int], new: Iterable[Any]) -> list[Any]:
    """The values, with new ones at these indices."""
    full = list(values)
    for i, value in zip(indices, new, strict=True):
        full[i] = value
    return full


def restricted(
    fn: Callable[..., Any], values: Sequence[Any], indices: Sequence[int]
) -> Callable[..., Any]:
    """`fn(*values)` as a function of the values at these indices."""
    return lambda *some: fn(*fill(values, indices, some))


def flagged(flags: Iterable[bool]) -> list[int]:
    """The indices of the flags that are true."""
    return [i for i, flag in enumerate(flags) if flag]
