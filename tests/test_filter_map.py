"""`filter_map` is `jax.vmap` in chunks: values, derivatives, memory, errors."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close, checking_leaks
from .ops import sin_times_jvp, sin_times_vjp


pytestmark = pytest.mark.versions


FLOAT = jnp.zeros(()).dtype
XS = {"x": np.random.default_rng(0).normal(size=(11, 3)).astype(FLOAT), "tag": "tag"}
SCALES = jnp.linspace(0.5, 1.5, 11)


@pytest.mark.parametrize("rule", [sin_times_jvp, sin_times_vjp])
def test_rules_and_captured_tracers(rule):
    def loss(y, run):
        return jnp.sum(run(lambda x: rule(x, y))(SCALES))

    by_map = lambda f: lambda xs: eqg.filter_map(f, xs, chunk=3)
    for transform in (jax.grad, lambda f: jax.grad(jax.grad(f)), jax.jacfwd):
        got = jax.jit(transform(lambda y: loss(y, by_map)))(0.7)
        assert_close(got, transform(lambda y: loss(y, jax.vmap))(0.7), eps=50)
    with checking_leaks():
        jax.jit(jax.grad(lambda y: loss(y, by_map)))(0.7)
    batched = jax.vmap(jax.grad(lambda y: loss(y, by_map)))(SCALES)
    assert_close(batched, jax.vmap(jax.grad(lambda y: loss(y, jax.vmap)))(SCALES), eps=50)


def test_keys_integers_and_no_slices():
    keys = jr.split(jr.key(0), 7)
    draw = lambda key, i: (jr.normal(key, (2,)) + i.astype(FLOAT), key)
    got, same = eqg.filter_map(draw, keys, np.arange(7), chunk=3)
    np.testing.assert_array_equal(got, jax.vmap(draw)(keys, jnp.arange(7))[0])
    assert jnp.all(same == keys)
    assert eqg.filter_map(jnp.sin, jnp.zeros((0, 3))).shape == (0, 3)


def test_exporting_a_symbolic_number_of_slices():
    (n,) = jax.export.symbolic_shape("n")
    xs = jax.ShapeDtypeStruct((n, 3), FLOAT)
    exported = jax.export.export(jax.jit(lambda xs: eqg.filter_map(jnp.sin, xs)))(xs)
    assert_close(exported.call(XS["x"]), jnp.sin(XS["x"]))
    with pytest.raises(RuleError, match="can't divide a symbolic number of slices"):
        jax.export.export(jax.jit(lambda xs: eqg.filter_map(jnp.sin, xs, chunk=2)))(xs)


def test_the_memory_is_that_of_a_chunk():
    mlp = eqx.nn.MLP(8, "scalar", 128, 2, key=jr.key(0))
    xs = jnp.ones((1024, 8))

    def temporary(run):
        loss = lambda mlp, xs: jnp.sum(run(mlp, xs))
        compiled = eqx.filter_jit(eqx.filter_grad(loss)).lower(mlp, xs).compile()
        return compiled.compiled.memory_analysis().temp_size_in_bytes

    all_at_once = temporary(lambda mlp, xs: jax.vmap(mlp)(xs))
    by_jax = temporary(lambda mlp, xs: jax.lax.map(mlp, xs, batch_size=32))
    chunked = temporary(eqg.filter_map)
    assert chunked < by_jax / 3
    assert chunked < all_at_once / 3


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((2.0,), {}, "`filter_map` of `sin` can't tell its length"),
        (
            (jnp.ones(3), {"a": jnp.ones(4)}),
            {},
            r"lengths that differ.\n  .*, `xs\[1\]\['a'\]`",
        ),
        ((jnp.array(1.0),), {}, r"without a first axis.\n  `xs\[0\]` is float..\[\]"),
        ((jnp.ones(3),), {"chunk": 0}, "`chunk` of `filter_map` is not an integer"),
        ((jnp.ones(3),), {"chunk": True}, "it is True"),
        ((jnp.ones(3),), {"checkpoint": "sqrt"}, "`checkpoint` of `filter_map` is not a bool"),
    ],
)
def test_errors(args, options, message):
    with pytest.raises(RuleError, match=message):
        eqg.filter_map(jnp.sin, *args, **options)
