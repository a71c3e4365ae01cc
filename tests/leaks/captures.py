"""Rules, functions and function-valued arguments that hold traced values of their own.

`tests/test_closures.py` goes through the ways of holding one; this goes through the places
that one comes from.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from .compositions import both_ways, x, xs, ys
from .registry import both, for_each, ran, ruled, shape


KINDS = ("jvp", "vjp", "gradient", "elementwise")


def capturing(rules, kind, a):
    """`x -> sin(x) * a`. The function and its rules all close over `a`."""

    def value(x):
        return jnp.sin(x) * a

    def value_and_gradient(x):
        cos = jnp.cos(x)
        return jnp.sin(x) * a, lambda ct: ran(cos * a * ct)

    if kind == "gradient":
        return rules.gradient(value_and_gradient)
    if kind == "elementwise":
        return rules.elementwise(value, lambda out, x: ran(jnp.cos(x) * a))
    product = lambda x, t: jnp.cos(x) * a * t
    return ruled(rules, kind, value, product, lambda x, ct: (product(x, ct),))


@for_each(*KINDS)
def captured_from_jit(rules, kind):
    """https://github.com/jax-ml/jax/pull/24545 (`custom_gradient`)"""
    f_of = lambda x, a: capturing(rules, kind, a)(x)
    inner = jax.jit(lambda x, a: jax.value_and_grad(f_of)(x, a))
    outer = jax.value_and_grad(jax.jit(f_of))
    return inner(x(), x()), outer(x(), x())


@both
def captured_by_rule_only(ruled):
    """An integer that changes nothing: https://github.com/jax-ml/jax/pull/34216"""

    def f_of(x, n):
        product = lambda x, t: jnp.where(n < 0, 0 * t, jnp.cos(x) * t)
        return ruled(jnp.sin, product, lambda x, ct: (product(x, ct),))(x)

    return both_ways(f_of, x(), jnp.array(3))


@for_each(*KINDS)
def captured_from_scan_body(rules, kind):
    def loss(x, ys):
        body = lambda x, y: (capturing(rules, kind, jnp.cos(y))(x), None)
        return jax.lax.scan(body, x, ys)[0]

    return both_ways(loss, x(), ys())


@for_each(*KINDS)
def captured_from_vmap(rules, kind):
    """With an argument that is not batched: https://github.com/jax-ml/jax/issues/5440"""
    f_of = lambda x, a: capturing(rules, kind, a)(x)
    total = lambda x, ys: jnp.sum(jax.vmap(f_of, in_axes=(None, 0))(x, ys))
    inner = jax.vmap(jax.grad(f_of), in_axes=(None, 0))
    return inner(x(), ys()), both_ways(total, x(), ys())


@for_each(*KINDS)
def captured_through_stop_gradient(rules, kind):
    """The value is being differentiated, but not by this way."""
    return both_ways(lambda x: capturing(rules, kind, jax.lax.stop_gradient(x))(x), x())


@for_each(*KINDS, error="with respect to a value that it closes over.\n.*`a`")
def differentiated_capture(rules, kind):
    """https://github.com/jax-ml/jax/issues/2520"""
    jax.grad(lambda a: capturing(rules, kind, a)(x()))(x())


def applying(rules, kind):
    """`apply(fn, x) = fn(x)`, with a rule. `fn` is traced along, wherever it comes from."""

    def apply(fn, x):
        return fn(x)

    def fwd(fn, x):
        out, pull_back = eqx.filter_vjp(apply, fn, x)
        return out, ran(pull_back)  # a function among the residuals

    if kind == "jvp":
        return ruled(rules, kind, apply)
    return rules.vjp(apply, fwd, lambda pull_back, ct: pull_back(ct))


@for_each("jvp", "vjp")
def function_argument_that_captures(rules, kind):
    """In several places."""
    apply = applying(rules, kind)
    value = lambda x, a: apply(lambda x: jnp.sin(x) * a, x)
    loss = lambda x, ys: jax.lax.scan(lambda x, y: (value(x, y), None), x, ys)[0]
    batched = jax.vmap(jax.grad(value), in_axes=(None, 0))(x(), ys())
    return both_ways(value, x(), x()), jax.grad(loss)(x(), ys()), batched


@for_each("jvp", "vjp")
def closure_converted_with_integer(rules, kind):
    """https://github.com/jax-ml/jax/pull/14760"""
    apply = applying(rules, kind)

    def loss(x, n):
        fn, constants = jax.closure_convert(lambda x: jnp.sin(x) * n.astype(x.dtype), x)
        return apply(lambda x: fn(x, *constants), x)

    return both_ways(loss, x(), jnp.array(2))


@shape
def gradient_closure_is_a_vjp(rules):
    """https://github.com/jax-ml/jax/issues/23588"""

    @rules.gradient
    def f(x):
        out, pull_back = jax.vjp(lambda x: jnp.sin(x) ** 2, x)
        return out, lambda ct: ran(pull_back(ct)[0])

    return both_ways(lambda xs: jnp.sum(jax.vmap(f)(xs)), xs())
