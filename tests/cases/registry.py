"""How an op is entered for `test_conformance`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp


class Case(NamedTuple):
    """`make()` returns the function and its arguments; `options` are `check_rule`'s."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    options: dict[str, Any]


CASES: dict[str, Case] = {}


def case(name: str, **options: Any):
    """Enter the decorated `make() -> (fn, args)`."""

    def enter(make):
        assert name not in CASES, name
        CASES[name] = Case(make, options)
        return make

    return enter


def vectors():
    return jnp.array([0.5, -1.2, 2.0]), jnp.array([1.5, 0.3, -0.7])


def vector():
    return vectors()[0]
