"""A part of some operands: a list of them and indices, or several lists and lists of flags."""

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


def select(flags: Sequence[Sequence[bool]], parts: Sequence[Any]) -> tuple[list[Any], ...]:
    """The values in each part that have a flag."""
    return tuple(at(p, flagged(f)) for f, p in zip(flags, parts, strict=True))


def replace(parts: Sequence[Any], flags: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...]:
    """The parts, with new values where there is a flag."""
    each = zip(parts, flags, new, strict=True)
    return tuple(fill(values, flagged(f), some) for values, f, some in each)
