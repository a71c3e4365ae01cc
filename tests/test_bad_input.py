"""Arguments of no use: the error names the function and the argument. `tests/hostile` calls
every function with many; these are errors that were silent once, or in the words of others."""

from types import SimpleNamespace

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest


X = jnp.ones(3)
KEY = jr.key(0)
FALL = lambda t, y: -y
DOUBLE = eqg.custom_jvp(lambda x: 2 * x)
DOUBLE.def_jvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))
ROWS, WEIGHT, LABELS = jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.array([0, 1, 2])
cross_entropy = eqg.losses.linear_cross_entropy
TYPE = jax.ShapeDtypeStruct((3,), "float32")

CALLS = {
    "in another order": (
        lambda: eqg.event_time((1.0, 2.0), FALL, FALL, 1.0),
        "`condition` of `event_time` is not a function.\n.*tuple",
    ),
    "an array for a dtype": (lambda: eqg.cast_gradient(X, X), "a dtype that is not floating"),
    "a type for a value": (
        lambda: eqg.replace_gradient(TYPE, X), "a surrogate that can't replace the value"
    ),
    "a type for a start": (
        lambda: eqg.fixed_point(jnp.cos, TYPE), "a start that is not floating"
    ),
    "a complex predicate": (
        lambda: eqg.filter_cond(1 + 2j, jnp.sin, jnp.cos, X),
        "`pred` of `filter_cond` is not one boolean or real number",
    ),
    "nothing to fit a scale to": (
        lambda: eqg.nn.LSQ(4).fit(jnp.zeros(0)),
        "`LSQ.fit` was given no numbers",
    ),
    "statistics beyond memory": (
        lambda: eqg.GradientStatistics(2**40),
        "`n` of `GradientStatistics` is not a number of steps",
    ),
    "a traced value in an object": (
        lambda: jax.jit(lambda x: DOUBLE({"a": [SimpleNamespace(x=x)]}))(X),
        r"inside a `SimpleNamespace`.*at `x\['a'\]\[0\]`",
    ),
    "a list for a name": (
        lambda: jax.vmap(lambda x: eqg.psum_gradient(x, ["i"]), axis_name="i")(X),
        "`psum_gradient` was given the name of an axis",
    ),
    "keys for a state": (
        lambda: eqg.nn.RNNCell(2, 3, key=KEY)(jnp.ones(2), jr.split(KEY, 3)),
        "something that does not fit its neurons.*`h` is",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", CALLS)
def test_error(name):
    call, match = CALLS[name]
    with pytest.raises(eqg.RuleError, match=f"(?s){match}"):
        # Where JAX makes tracers, also of constants.
        jax.eval_shape(lambda: jax.tree.leaves(call()))


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("large", [2**40, 10**30])
def test_large_integers_are_numbers(large):
    """JAX takes no Python integer beyond its own range."""
    root = eqg.implicit(lambda y, a: y**2 - a, tolerance=large)(jnp.sqrt)
    layer = lambda: jax.tree.leaves(eqg.nn.S5(2, 1, 4, max_step=large, key=KEY))
    assert jax.eval_shape(lambda: (jax.grad(root)(4.0), layer()))


def test_numbers_that_are_known():
    """Of NumPy, in an array, in half precision inside a trace."""
    x = jnp.array([1.0, 2.0, 4.0])
    assert jnp.allclose(eqg.safe.std(x, ddof=np.float32(1)), jnp.std(x, ddof=1))
    assert jnp.allclose(eqg.safe.norm(x, ord=np.int64(1)), 7.0)
    assert jnp.allclose(jax.jit(lambda x: eqg.safe.norm(x, ord=np.inf))(x), 4.0)
    loss = lambda i: cross_entropy(ROWS, WEIGHT, LABELS, ignore_index=i)
    one = jnp.array(1)  # known, and not a tracer
    assert jax.jit(lambda: loss(one) - loss(1))() == 0
    p = jnp.array([0.2, 0.9], jnp.float16)
    assert jax.jit(lambda: eqg.ste.bernoulli(p, key=KEY))().dtype == jnp.float16
