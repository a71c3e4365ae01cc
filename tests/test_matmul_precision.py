"""Matrix products of rules have the precision that the function was in, and layers in TF32 and
bfloat16 are right to the tolerance of `MATMUL_EPS`."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads._jaxprs.evaluate import bind, enter, evaluate
from eqx_grads._jaxprs.structure import inner_programs

from .helpers import assert_close, MATMUL_EPS


WEIGHT, X = jr.normal(jr.key(0), (3, 3)), jr.normal(jr.key(1), (3,))
XS = jr.normal(jr.key(2), (12, 2, 3))
on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="There is no GPU.")


@eqg.custom_jvp
def forward(w, x):
    return w @ x


@forward.def_jvp
def _forward_jvp(primals, tangents):
    (w, x), (t_w, t_x) = primals, tangents
    return forward(w, x), t_w @ x + w @ t_x


@eqg.custom_vjp
def reverse(w, x):
    return w @ x


@reverse.def_fwd
def _reverse_fwd(w, x):
    return reverse(w, x), (w, x)


@reverse.def_bwd
def _reverse_bwd(residuals, ct):
    w, x = residuals
    return ct[:, None] @ x[None], ct @ w


def gru(w, x):
    layer = nn.GRU(3, 3, key=jr.key(0))
    return layer(jnp.stack([x, w @ x]))[0]


FUNCTIONS = [forward, reverse, gru]
DERIVATIVES = {
    "grad": lambda f: jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "vmap": lambda f: jax.vmap(jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)), (None, 0)),
    "hessian": lambda f: jax.hessian(lambda w, x: jnp.sum(f(w, x) ** 2), (0, 1)),
}


def products(program):
    """The precisions of all matrix products in a program."""
    for eqn in program.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.params["precision"]
        for inner in inner_programs(eqn):
            yield from products(inner)


def in_highest(f):
    def wrapped(*args):
        with jax.default_matmul_precision("highest"):
            return f(*args)

    return wrapped


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_context_in_the_function_holds_for_its_rules(f, derivative, jit):
    x = jnp.stack([X, X]) if derivative == "vmap" else X
    derive = DERIVATIVES[derivative](jit(in_highest(f)))
    found = list(products(jax.make_jaxpr(derive)(WEIGHT, x)))
    assert found
    assert set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


def in_rounded_products(f, bits):
    """`f` with the operands of each matrix product rounded to so many bits, as a GPU does."""

    def hook(eqn, values):
        if eqn.primitive.name == "dot_general":
            values = [jax.lax.reduce_precision(x, 8, bits) for x in values]
        elif inner_programs(eqn):
            return enter(eqn, values, lambda program, args, _: evaluate(program, args, hook))
        return bind(eqn, values)

    def rounded(*args):
        values, treedef = jax.tree.flatten(args)
        program, out = jax.make_jaxpr(
            lambda values: f(*jax.tree.unflatten(treedef, values)), return_shape=True
        )(values)
        return jax.tree.unflatten(jax.tree.structure(out), evaluate(program, values, hook))

    return jax.jit(rounded)


def gradient_of(name, is_layer):
    cell = {"GRU": eqx.nn.GRUCell, "LSTM": eqx.nn.LSTMCell, "RNN": nn.RNNCell}[name](
        3, 8, key=jr.key(0)
    )
    arrays, static = eqx.partition(cell, eqx.is_array)

    def loss(arrays, xs):
        cell = eqx.combine(arrays, static)
        if is_layer:
            ys = nn.Recurrent(cell, time_major=True)(xs)[0]
        else:
            zero = jnp.zeros((2, 8))
            state = (zero, zero) if name == "LSTM" else zero

            def step(state, x):
                state = jax.vmap(cell)(x, state)
                return state, jax.tree.leaves(state)[0]

            ys = jax.lax.scan(step, state, xs)[1]
        return jnp.sum(jnp.sin(ys))

    return jax.grad(loss, (0, 1)), arrays


@pytest.mark.parametrize("name", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize(("precision", "bits"), [("tensorfloat32", 10), ("bfloat16", 7)])
def test_layers_with_rounded_products(name, precision, bits):
    layer, arrays = gradient_of(name, is_layer=True)
    plain, _ = gradient_of(name, is_layer=False)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(plain)(arrays, XS)
    tolerance = MATMUL_EPS[precision]
    for gradient in (layer, plain):
        rounded = in_rounded_products(gradient, bits)(arrays, XS)
        assert_close(rounded, exact, tolerance=tolerance)
        with pytest.raises(AssertionError, match="relative"):  # it was rounded
            assert_close(rounded, exact, tolerance=tolerance / 30)


@on_gpu
@pytest.mark.parametrize("name", ["GRU", "LSTM", "RNN"])
@pytest.mark.parametrize(
    ("precision", "eps"), [("highest", "float32"), ("tensorfloat32", "tensorfloat32")]
)
def test_layers_on_a_gpu(name, precision, eps):
    layer, arrays = gradient_of(name, is_layer=True)
    plain, _ = gradient_of(name, is_layer=False)
    with jax.default_matmul_precision(precision):
        got, expected = jax.jit(layer)(arrays, XS), jax.jit(plain)(arrays, XS)
    assert_close(got, expected, tolerance=4 * MATMUL_EPS[eps])
