"""Every public op of the library with sample arguments: what `test_conformance` runs over.

`CASES` maps a name to a `Case`. An op is the part of the name before the first colon, so that
one op may have several cases: `"elementwise"`, `"elementwise: two arguments"`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_grads as eqg
import jax.numpy as jnp

from . import ops


class Case(NamedTuple):
    """`make()` returns the function and its arguments; `options` are `check_rule`'s."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    options: dict[str, Any] = {}  # noqa: RUF012  it is never written to


CASES: dict[str, Case] = {}

# What makes or handles rules, and is no op itself. Each is at work in the cases and has tests
# of its own.
NOT_OPS = {"RuleError"}


def case(name: str, **options: Any):
    """Enter the decorated `make() -> (fn, args)`."""

    def enter(make):
        assert name not in CASES, name
        CASES[name] = Case(make, options)
        return make

    return enter


def vectors():
    return jnp.array([0.5, -1.2, 2.0]), jnp.array([1.5, 0.3, -0.7])


@case("custom_jvp")
def _():
    return ops.sin_times_jvp, vectors()


@case("custom_jvp: symbolic zeros")
def _():
    return ops.sin_times_none, vectors()


@case("custom_vjp")
def _():
    return ops.sin_times_vjp, vectors()


@case("custom_vjp: with a forward rule too")
def _():
    return ops.sin_times_three, vectors()


@case("elementwise", at=[(jnp.zeros(3), jnp.zeros(3))])
def _():
    return ops.sin_times_elementwise, vectors()


def _twice(x):
    return 2 * x


@case("replace_gradient", reference=_twice, skip=("zeros",))
def _():
    return lambda x: eqg.replace_gradient(jnp.round(x), 2 * x), (vectors()[0],)


@case("with_gradient_of", reference=_twice)
def _():
    return eqg.with_gradient_of(jnp.round, _twice), (vectors()[0],)


@case("custom_gradient")
def _():
    @eqg.custom_gradient
    def square(x):
        return x**2, lambda ct: (2 * x * ct,)

    return square, (vectors()[0],)


@case("nondifferentiable", nondifferentiable=("y",))
def _():
    return lambda x, y: x * eqg.nondifferentiable(y), vectors()
