"""NumPy arrays of 64 bits that a function captures, under the checkers, which compute in both
precisions: JAX has one constant for both, in that of the first program that is alive."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


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
CHECKS = ("primal", "forward", "reverse", "transforms")
OF_EACH = pytest.mark.parametrize("name", list(_functions()))


@pytest.fixture(autouse=True)
def _standard_promotion():
    """As users have it. The tests have the strict one."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _works(fn):
    jax.jit(fn)(X, Y)
    jax.grad(lambda x, y: jnp.sum(fn(x, y)))(X, Y)


@pytest.mark.thorough
@pytest.mark.every(4)
@OF_EACH
@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_check_rule(name, is_compiled_before):
    fn = _functions()[name]
    if is_compiled_before:
        _works(fn)
    eqgt.check_rule(fn, X, Y, checks=CHECKS)
    _works(fn)  # and JAX has no constant of the other precision for it


@OF_EACH
@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_check_gradients(name, is_compiled_before):
    fn = _functions()[name]
    if is_compiled_before:
        _works(fn)
    report = eqgt.check_gradients(lambda x, y: jnp.sum(fn(x, y) ** 2), X, Y)
    assert report.passed
    _works(fn)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["in function and rule", "in the rule only"])
def test_a_wrong_rule_is_found(name):
    with pytest.raises(eqgt.RuleCheckError, match="twice the expected one"):
        eqgt.check_rule(_functions(2.0)[name], X, Y, checks="reverse")
    fn = _functions(2.0)[name]
    report = eqgt.check_gradients(lambda x, y: jnp.sum(fn(x, y) ** 2), X, Y, raises=False)
    assert not report.passed


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


@pytest.mark.parametrize("grid", [np.linspace(0.2, 1, 3), np.array([1, 2, 3])])
def test_in_the_reference(grid):
    rule = eqg.with_gradient_of(jnp.round, lambda x: x * jnp.asarray(grid, x.dtype))
    eqgt.check_rule(rule, X[:3], reference=lambda x: x * grid, checks=("forward", "reverse"))
