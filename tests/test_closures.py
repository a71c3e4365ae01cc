"""Functions and rules that hold traced values: hoisted, or a clear error.

Every way to hold one, in every function that may, under every order of transformations.
"""

import contextlib
import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close, checking_leaks
from .rules.holding import (
    FIVE,
    HOLDERS,
    many,
    OTHERS,
    raw_custom_jvp,
    x,
)


pytestmark = pytest.mark.versions


# ------------------------------------------------------------------ where it comes from
# `f_of(a)` is `sin(x) * a` as a function of `x` and `a`, made where `a` is traced.


def jit_of_grad(f_of):
    return jax.jit(lambda x, a: jax.value_and_grad(f_of(a))(x, a))(x(), many()[0])


def grad_of_jit(f_of):
    return jax.value_and_grad(jax.jit(lambda x, a: f_of(a)(x, a)))(x(), many()[0])


def scan(f_of):
    """The gradient outside of the scan, and inside."""

    def loss(x, many):
        body = lambda x, a: (f_of(2 * a)(x, 2 * a), jax.grad(f_of(a))(x, a))
        x, slopes = jax.lax.scan(body, x, many)
        return x, slopes

    outside = jax.value_and_grad(loss, has_aux=True)(x(), many())
    return outside, jax.grad(jax.jit(loss), has_aux=True)(x(), many())


def vmap(f_of):
    """The gradient outside of the map, and inside; `x` batched, and not."""
    f = lambda x, a: f_of(a)(x, a)
    total = lambda x, many: jnp.sum(jax.vmap(f, in_axes=(None, 0))(x, many))
    return (
        jax.grad(total)(x(), many()),
        jax.grad(jax.jit(total))(x(), many()),
        jax.vmap(jax.grad(f), in_axes=(None, 0))(x(), many()),
        jax.vmap(jax.grad(f))(many(), many()),
    )


ORDERS = (jit_of_grad, grad_of_jit, scan, vmap)
# The checker finds it without a rule of ours: https://github.com/jax-ml/jax/pull/34216
LEAKY = (raw_custom_jvp,)
CASES = [(hold, holders) for hold in FIVE for holders in HOLDERS]
CASES += [(hold, holders) for hold in OTHERS for holders in ("jvp, both", "vjp, all")]


@ft.cache
def expected(order):
    return order(lambda a: lambda x, a: jnp.sin(x) * a)


@pytest.mark.parametrize(("hold", "holders"), CASES)
@pytest.mark.parametrize("order", ORDERS)
def test_held(hold, holders, order):
    op, holders = HOLDERS[holders]
    with contextlib.nullcontext() if hold in LEAKY else checking_leaks():
        got = order(lambda a: op(hold, a, holders))
    assert_close(got, expected(order))


# ------------------------------------------------------------------ further shapes


def in_both_orders(f_of):
    return jit_of_grad(f_of), grad_of_jit(f_of)


def agree(f_of, value=lambda x, a: jnp.sin(x) * a):
    """`f_of(a)(x)` has the value and the derivative of `value(x, a)`."""
    with checking_leaks():
        got = in_both_orders(lambda a: lambda x, _: f_of(a)(x))
    assert_close(got, in_both_orders(lambda a: lambda x, _: value(x, a)))


@pytest.mark.parametrize("holders", ["jvp, rule", "vjp, bwd"])
@pytest.mark.parametrize("hold", FIVE)
def test_rules_are_differentiated_with_respect_to_what_they_hold(hold, holders):
    """The value does not depend on what only a rule holds, but the first derivative does."""
    op, holders = HOLDERS[holders]
    slope = lambda a: jax.grad(op(hold, a, holders))(x(), jnp.array(2.0))
    plain = jax.grad(lambda a: jax.grad(lambda x: jnp.sin(x) * a)(x()))(x())
    assert_close(jax.grad(slope)(x()), plain)
    assert_close(jax.grad(jax.jit(slope))(x()), plain)


@pytest.mark.thorough
def test_rules_that_name_each_other():
    """Cycles: the rules of two functions call both functions, through cells that are filled
    after the rules were given."""

    def f_of(a):
        even = eqg.custom_jvp(lambda x: jnp.cos(x) * a)

        @even.def_jvp
        def _even_jvp(primals, tangents):
            return even(*primals), -odd(*primals) * tangents[0]

        odd = eqg.custom_jvp(lambda x: jnp.sin(x) * a)

        @odd.def_jvp
        def _odd_jvp(primals, tangents):
            return odd(*primals), even(*primals) * tangents[0]

        return odd

    agree(f_of)
    third = jax.grad(jax.grad(jax.jit(jax.grad(lambda x, a: f_of(a)(x)))))
    assert_close(third(x(), x()), -jnp.cos(x()) * x())


def test_recursion():
    """A function that calls itself, and closes over itself."""

    def f_of(a):
        @eqg.custom_vjp
        def power(x, n):
            return a if n == 0 else x * power(x, n - 1)

        @power.def_fwd
        def _fwd(x, n):
            return power(x, n), (x, n)

        @power.def_bwd
        def _bwd(residuals, ct):
            x, n = residuals
            return ct * n * power(x, n - 1), None

        return lambda x: power(x, 3)

    agree(f_of, lambda x, a: a * x**3)


def test_cycle_through_a_container():
    def f_of(a):
        table = {"a": a}

        def value(x):
            return jnp.sin(x) * table["a"]

        table["f"] = f = eqg.custom_jvp(value)

        @f.def_jvp
        def _jvp(primals, tangents):
            return table["f"](*primals), jnp.cos(primals[0]) * table["a"] * tangents[0]

        return f

    agree(f_of)


@pytest.mark.parametrize("order", ORDERS)
def test_a_function_as_residual(order):
    """That closes over the primal, over the tracer, and over another such function."""

    def f_of(a):
        f = eqg.custom_vjp(lambda x, b: jnp.sin(x) * b)

        @f.def_fwd
        def _fwd(x, b):
            slope = lambda: jnp.cos(x)
            return f(x, b), {"scale": lambda ct: slope() * a * ct, "sin": jnp.sin(x)}

        @f.def_bwd
        def _bwd(residuals, ct):
            return residuals["scale"](ct), residuals["sin"] * ct

        return f

    with checking_leaks():
        got = order(f_of)
    assert_close(got, expected(order))


@pytest.mark.parametrize("by", ["position", "keyword"])
@pytest.mark.parametrize("hold", FIVE)
@pytest.mark.parametrize("order", ORDERS)
def test_a_function_as_argument(order, hold, by):
    """That holds a tracer in each way."""

    def f_of(a):
        inner = hold(lambda a, x: jnp.sin(x) * a, a)
        if by == "position":
            f = eqg.custom_vjp(lambda fn, x: fn(x))
            f.def_fwd(lambda fn, x: jax.vjp(fn, x))
            f.def_bwd(lambda pull_back, ct: (None, *pull_back(ct)))
            return lambda x, _: f(inner, x)
        f = eqg.custom_jvp(lambda x, *, fn: fn(x))
        f.def_jvp(lambda primals, tangents, *, fn: jax.jvp(fn, primals, tangents))
        return lambda x, _: f(x, fn=inner)

    with checking_leaks():
        got = order(f_of)
    assert_close(got, expected(order))
