"""Arguments of other classes than `jax.Array` that JAX takes for numbers, arrays and bools."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

from .helpers import assert_close


X = jnp.linspace(0.25, 2.0, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def _no_type_checks():
    """As users run it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Variable:
    """An object that JAX converts to an array, as the variables of several libraries."""

    def __init__(self, value):
        self.value = value
        self.shape, self.dtype = value.shape, value.dtype
        self.ndim, self.size = value.ndim, value.size

    def __jax_array__(self):
        return self.value


FUNCTIONS = {
    "add": lambda x: eqg.tangents.add(x, x),
    "dot": lambda x: eqg.tangents.dot(x, x),
    "scale": lambda x: eqg.tangents.scale(X, x),
    "norm": eqg.safe.norm,
    "sqrt": eqg.safe.sqrt,
    "softmax": eqg.safe.softmax,
    "ste.round": eqg.ste.round,
    "ste.ternary": lambda x: eqg.ste.ternary(X, threshold=x),
    "linear_recurrence": lambda x: eqg.linear_recurrence(x, x),
    "scale_gradient": lambda x: jax.grad(lambda y: jnp.sum(eqg.scale_gradient(y, x)))(X),
    "substitute": lambda x: eqg.safe.where(X > 1, jnp.sqrt, X, 0.0, substitute=x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_object_that_jax_converts(name):
    assert_close(FUNCTIONS[name](Variable(X)), FUNCTIONS[name](X))


def _loss(x):
    return jnp.sum(x**2)


HALF = {
    "0-d of NumPy": np.array(0.5),
    "0-d of JAX": jnp.array(0.5),
    "bfloat16": ml_dtypes.bfloat16(0.5),
    "NumPy": np.float32(0.5),
}


@pytest.mark.parametrize("number", HALF.values(), ids=HALF)
def test_a_number_may_be_an_array_without_axes(number):
    root = eqg.implicit(lambda y, a: y * y - a, tolerance=number)(jnp.sqrt)
    assert_close(jax.jit(jax.grad(root))(4.0), 0.25)
    reports = [eqg.explain_nan(_loss, X, threshold=t) for t in (number, 0.5)]
    assert str(reports[0]) == str(reports[1])
    eqgt.assert_trees_close(X, X, tolerance=number)


def test_a_number_of_which_jax_keeps_the_value():
    with pytest.raises(eqg.RuleError, match="The `tolerance` of `implicit` is not a number"):
        jax.jit(lambda t: eqg.implicit(lambda y, a: y - a, tolerance=t)(jnp.sin)(1.0))(0.5)


def test_unroll_is_a_bool_of_numpy():
    step = lambda carry, x: (carry + x, None)
    assert_close(eqg.filter_scan(step, 0.0, X[0], unroll=np.True_)[0], jnp.sum(X[0]))


def test_the_error_shows_what_was_given():
    with pytest.raises(eqg.RuleError, match=r"it is bool\[2,3\]"):
        eqg.tangents.neg(X > 1)
    with pytest.raises(eqg.RuleError, match=r"it is \[1, 2\]"):
        eqgt.random_tangent(X, seed=[1, 2])
