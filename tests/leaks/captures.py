"""Rules, functions and function-valued arguments that hold traced values of their own.

`tests/test_closures.py` goes through the ways of holding one; this goes through the places
that one comes from.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from .compositions import x, xs, ys
from .registry import for_each, ran, shape


KINDS = ("jvp", "vjp", "gradient", "elementwise")


def capturing(rules, kind, a):
    """`x -> sin(x) * a`. The function and its rules all close over `a`."""

    def value(x):
        return jnp.sin(x) * a

    def jvp(primals, tangents):
        (x,), (t_x,) = primals, tangents
        return f(x), ran(jnp.cos(x) * a * t_x)

    def fwd(x):
        return f(x), ran(jnp.cos(x))

    def bwd(cos, ct):
        return (cos * a * ct,)

    def value_and_gradient(x):
        cos = jnp.cos(x)
        return jnp.sin(x) * a, lambda ct: ran(cos * a * ct)

    def partial(out, x):
        return ran(jnp.cos(x) * a)

    if kind == "jvp":
        f = rules.jvp(value, jvp)
    elif kind == "vjp":
        f = rules.vjp(value, fwd, bwd)
    elif kind == "gradient":
        f = rules.gradient(value_and_gradient)
    else:
        f = rules.elementwise(value, partial)
    return f


def only_rule_captures(rules, kind, a):
    """`x -> sin(x)`, whose rules alone close over `a`, an integer that changes nothing."""

    def jvp(primals, tangents):
        (x,), (t_x,) = primals, tangents
        return f(x), ran(jnp.where(a < 0, 0 * t_x, jnp.cos(x) * t_x))

    def fwd(x):
        return jnp.sin(x), x

    def bwd(x, ct):
        return (ran(jnp.where(a < 0, 0 * ct, jnp.cos(x) * ct)),)

    f = rules.jvp(jnp.sin, jvp) if kind == "jvp" else rules.vjp(jnp.sin, fwd, bwd)
    return f


@for_each(KINDS)
def captured_from_jit(rules, kind):
    """https://github.com/jax-ml/jax/pull/24545 (`custom_gradient`)"""
    f_of = lambda x, a: capturing(rules, kind, a)(x)
    inner = jax.jit(lambda x, a: jax.value_and_grad(f_of)(x, a))
    outer = jax.value_and_grad(jax.jit(f_of))
    return inner(x(), x()), outer(x(), x())


@for_each(("jvp", "vjp"))
def captured_by_rule_only(rules, kind):
    """https://github.com/jax-ml/jax/pull/34216"""
    f_of = lambda x, n: only_rule_captures(rules, kind, n)(x)
    n = jnp.array(3)
    return jax.jit(jax.grad(f_of))(x(), n), jax.grad(jax.jit(f_of))(x(), n)


@for_each(KINDS)
def captured_from_scan_body(rules, kind):
    def loss(x, ys):
        body = lambda x, y: (capturing(rules, kind, jnp.cos(y))(x), None)
        return jax.lax.scan(body, x, ys)[0]

    return jax.grad(loss)(x(), ys()), jax.jit(jax.grad(loss))(x(), ys())


@for_each(KINDS)
def captured_from_vmap(rules, kind):
    """With an argument that is not batched: https://github.com/jax-ml/jax/issues/5440"""
    f_of = lambda x, a: capturing(rules, kind, a)(x)
    total = lambda x, ys: jnp.sum(jax.vmap(f_of, in_axes=(None, 0))(x, ys))
    inner = jax.vmap(jax.grad(f_of), in_axes=(None, 0))
    return inner(x(), ys()), jax.grad(total)(x(), ys()), jax.jit(jax.grad(total))(x(), ys())


@for_each(KINDS)
def captured_through_stop_gradient(rules, kind):
    """The value is being differentiated, but not by this way."""
    f_of = lambda x: capturing(rules, kind, jax.lax.stop_gradient(x))(x)
    return jax.grad(f_of)(x()), jax.jit(jax.grad(f_of))(x()), jax.grad(jax.jit(f_of))(x())


@for_each(KINDS, error="with respect to a value that it closes over.\n.*`a`")
def differentiated_capture(rules, kind):
    """https://github.com/jax-ml/jax/issues/2520"""
    jax.grad(lambda a: capturing(rules, kind, a)(x()))(x())


def applying(rules, kind):
    """`apply(fn, x) = fn(x)`, with a rule. `fn` is traced along, wherever it comes from."""

    def apply(fn, x):
        return fn(x)

    def jvp(primals, tangents):
        out, t_out = eqx.filter_jvp(apply, primals, tangents)
        return out, ran(t_out)

    def fwd(fn, x):
        out, pull_back = eqx.filter_vjp(apply, fn, x)
        return out, ran(pull_back)  # a function among the residuals

    def bwd(pull_back, ct):
        return pull_back(ct)

    return rules.jvp(apply, jvp) if kind == "jvp" else rules.vjp(apply, fwd, bwd)


@for_each(("jvp", "vjp"))
def function_argument_that_captures(rules, kind):
    """In several places."""
    apply = applying(rules, kind)
    value = lambda x, a: apply(lambda x: jnp.sin(x) * a, x)
    loss = lambda x, ys: jax.lax.scan(lambda x, y: (value(x, y), None), x, ys)[0]
    return (
        jax.jit(jax.grad(value))(x(), x()),
        jax.grad(jax.jit(value))(x(), x()),
        jax.grad(loss)(x(), ys()),
        jax.vmap(jax.grad(value), in_axes=(None, 0))(x(), ys()),
    )


@for_each(("jvp", "vjp"))
def closure_converted_with_integer(rules, kind):
    """https://github.com/jax-ml/jax/pull/14760"""
    apply = applying(rules, kind)

    def loss(x, n):
        fn, constants = jax.closure_convert(lambda x: jnp.sin(x) * n.astype(x.dtype), x)
        return apply(lambda x: fn(x, *constants), x)

    grad = jax.grad(loss)
    return jax.jit(grad)(x(), jnp.array(2)), jax.grad(jax.jit(loss))(x(), jnp.array(2))


@shape
def gradient_closure_is_a_vjp(rules):
    """https://github.com/jax-ml/jax/issues/23588"""

    @rules.gradient
    def f(x):
        out, pull_back = jax.vjp(lambda x: jnp.sin(x) ** 2, x)
        return out, lambda ct: ran(pull_back(ct)[0])

    total = lambda xs: jnp.sum(jax.vmap(f)(xs))
    return jax.jit(jax.grad(total))(xs()), jax.grad(jax.jit(total))(xs())
