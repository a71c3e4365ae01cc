"""NumPy arrays of 64 bits that a function captures, under the checkers, which compute in both
precisions: JAX has one constant for both, in the precision of the first program that is
alive."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


pytestmark = pytest.mark.x64


def _functions(factor=1.0):
    """New arrays each time: what JAX keeps of them is of no other test."""
    rows, grid = np.array([0, 0, 1, 1, 2]), np.linspace(0.1, 1.0, 5)

    def ruled(x, y):
        return x * y[rows]

    def in_the_rule_only(x, y):
        return x * jnp.stack([y[0], y[0], y[1], y[1], y[2]])

    def backward(residuals, ct):
        x, y = residuals
        return factor * ct * y[rows], jnp.zeros_like(y).at[rows].add(ct * x)

    rules = []
    for fn in (ruled, in_the_rule_only):
        rule = eqg.custom_vjp(fn)
        rule.def_fwd(lambda x, y, fn=fn: (fn(x, y), (x, y)))
        rule.def_bwd(backward)
        rules.append(rule)
    return {
        "scattered": lambda x, y: jnp.zeros_like(y).at[rows].add(jnp.sin(x)),
        "gathered": lambda x, y: x * y[rows],
        "taken": lambda x, y: x * jnp.take(y, rows),
        "multiplied": lambda x, y: jnp.sum(jnp.sin(x * grid.astype(x.dtype))) * y,
        "in a program": lambda x, y: jnp.tensordot(jnp.sin(x), grid, 1) * y,
        "in function and rule": rules[0],
        "in the rule only": rules[1],
    }


X, Y = jnp.array([2.0, -1.0, -0.5, 2.0, 1.0], "float32"), jnp.array([1.0, 0.5, 2.0], "float32")
OF_EACH = pytest.mark.parametrize("name", list(_functions()))


@pytest.fixture(autouse=True)
def _standard_promotion():
    """As users have it. The tests have the strict one."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _works(fn):
    jax.jit(fn)(X, Y)
    jax.grad(lambda x, y: jnp.sum(fn(x, y)))(X, Y)


@OF_EACH
@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_check_gradients(name, is_compiled_before):
    fn = _functions()[name]
    if is_compiled_before:
        _works(fn)
    report = eqgt.check_gradients(lambda x, y: jnp.sum(fn(x, y) ** 2), X, Y)
    assert report.passed
    _works(fn)


def _second_order(captured):
    """A rule in whose derivative is a rule that captures an array."""

    @jax.custom_jvp
    def inner(x):
        return jnp.cos(x)

    inner.defjvp(lambda p, t: (inner(*p), captured(-jnp.sin(p[0]) * t[0])))

    @jax.custom_jvp
    def outer(x):
        return jnp.sin(x)

    outer.defjvp(lambda p, t: (outer(*p), inner(*p) * t[0]))
    return outer


@pytest.mark.parametrize("kind", ["floats", "integers"])
def test_of_second_order(kind):
    """The user's function has its second derivative afterwards."""
    ones, rows = np.ones(3), np.arange(3)
    fn, x = (
        _second_order(
            (lambda t: (t * ones).astype(t.dtype)) if kind == "floats" else lambda t: t[rows]
        ),
        X[:3],
    )
    eqgt.check_rule(fn, x, checks=("forward", "reverse", "order"))
    jax.jit(jax.hessian(lambda x: jnp.sum(fn(x))))(x)
