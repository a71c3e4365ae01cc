"""Matrix products of rules have the precision that the function was in, and layers on a GPU in
TF32 are right to the tolerance of `MATMUL_EPS`."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from .helpers import assert_close, MATMUL_EPS


WEIGHT, X = jr.normal(jr.key(0), (3, 3)), jr.normal(jr.key(1), (3,))

forward = eqg.custom_jvp(lambda w, x: w @ x)
forward.def_jvp(lambda p, t: (forward(*p), t[0] @ p[1] + p[0] @ t[1]))
reverse = eqg.custom_vjp(lambda w, x: w @ x)
reverse.def_fwd(lambda w, x: (reverse(w, x), (w, x)))
reverse.def_bwd(lambda r, ct: (ct[:, None] @ r[1][None], ct @ r[0]))


def gru(w, x):
    return nn.GRU(3, 3, key=jr.key(0))(jnp.stack([x, w @ x]))[0]


DERIVATIVES = {
    "grad": lambda f: jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "vmap": lambda f: jax.vmap(jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)), (None, 0)),
    "hessian": lambda f: jax.hessian(lambda w, x: jnp.sum(f(w, x) ** 2), (0, 1)),
}


def in_highest(f):
    def wrapped(*args):
        with jax.default_matmul_precision("highest"):
            return f(*args)

    return wrapped


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("f", [forward, reverse, gru], ids=["forward", "reverse", "gru"])
def test_a_context_in_the_function_holds_for_its_rules(f, derivative):
    x = jnp.stack([X, X]) if derivative == "vmap" else X
    for jit in (jax.jit, lambda f: f):
        text = str(jax.make_jaxpr(DERIVATIVES[derivative](jit(in_highest(f))))(WEIGHT, x))
        in_highest_precision = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
        assert text.count("dot_general[") == text.count(in_highest_precision) > 0


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="There is no GPU.")
@pytest.mark.parametrize("name", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize(
    ("precision", "eps"), [("highest", "float32"), ("tensorfloat32", "tensorfloat32")]
)
def test_layers_on_a_gpu(name, precision, eps):
    cells = {"GRU": eqx.nn.GRUCell, "LSTM": eqx.nn.LSTMCell, "RNN": nn.RNNCell}
    arrays, static = eqx.partition(cells[name](3, 8, key=jr.key(0)), eqx.is_array)

    def of_layer(cell, xs):
        return nn.Recurrent(cell, time_major=True)(xs)[0]

    def of_scan(cell, xs):
        zero = jnp.zeros((2, 8))

        def step(state, x):
            state = jax.vmap(cell)(x, state)
            return state, jax.tree.leaves(state)[0]

        return jax.lax.scan(step, (zero, zero) if name == "LSTM" else zero, xs)[1]

    def gradient(run):
        loss = lambda arrays, xs: jnp.sum(jnp.sin(run(eqx.combine(arrays, static), xs)))
        return jax.jit(jax.grad(loss, (0, 1)))(arrays, jr.normal(jr.key(2), (12, 2, 3)))

    with jax.default_matmul_precision(precision):
        assert_close(gradient(of_layer), gradient(of_scan), tolerance=4 * MATMUL_EPS[eps])
