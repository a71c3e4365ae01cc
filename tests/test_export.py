"""`jax.export` of values and gradients, compared with the program that was exported."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads import losses, nn
from jax import export

from .helpers import assert_close


pytestmark = pytest.mark.versions


KEY = jr.key(0)
X = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)


def types_of(args):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def assert_exports(fn, *args, types=None):
    """The exported program of `fn`, with these types, computes what `fn` does."""
    program = export.export(jax.jit(fn))(*(types or types_of(args)))
    for got, expected in zip(
        jax.tree.leaves(program.call(*args)), jax.tree.leaves(fn(*args)), strict=True
    ):
        scale = jnp.max(jnp.abs(expected), initial=1.0)
        assert_close(got / scale, expected / scale, tolerance=1e-5)


softplus = eqg.custom_jvp(lambda x: jnp.logaddexp(x, 0.0))
softplus.def_jvp(lambda p, t: (softplus(*p), 2 * jax.nn.sigmoid(p[0]) * t[0]))
square = eqg.custom_vjp(lambda x: x * x)
square.def_fwd(lambda x: (square(x), x))
square.def_bwd(lambda x, ct: (3 * x * ct,))


@pytest.mark.parametrize("rule", [softplus, square])
def test_rules(rule):
    """The factors 2 and 3 are wrong on purpose: the exported gradient is the rule's."""
    loss = lambda x: jnp.sum(jnp.sin(rule(x)))
    assert_exports(jax.value_and_grad(loss), X)
    (b,) = export.symbolic_shape("b")
    types = (jax.ShapeDtypeStruct((b, 3), X.dtype),)
    assert_exports(jax.vmap(jax.grad(loss)), X, types=types)


# ---------------------------------------------------------------- symbolic sizes


LAYERS = {
    "GRU": lambda: nn.GRU(3, 4, key=KEY),
    "LSTM": lambda: nn.LSTM(3, 4, bidirectional=True, proj_size=2, key=KEY),
    "RNN": lambda: nn.RNN(3, 4, key=KEY),
    "Recurrent": lambda: nn.Recurrent(eqx.nn.GRUCell(3, 4, key=KEY)),
    "MinGRU": lambda: nn.MinGRU(3, 4, key=KEY),
    "LRU": lambda: nn.LRU(3, 4, 4, key=KEY),
    "S5": lambda: nn.S5(3, 4, 4, key=KEY),
    "GatedDeltaNet": lambda: nn.GatedDeltaNet(3, 4, heads=2, key_size=2, key=KEY),
    "SelectiveSSM": lambda: nn.SelectiveSSM(3, 4, 4, key=KEY),
    "LIF, all": lambda: nn.LIF(3, 4, 0.9, alpha=0.5, rho=0.9, recurrent=True, key=KEY),
}


@pytest.mark.thorough
@pytest.mark.every(5)
@pytest.mark.parametrize("of_last", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_over_time(layer, of_last):
    """A batch and a number of steps that are both symbolic, run at two sizes of each. With
    `of_last`, the outputs have no cotangent."""
    params, static = eqx.partition(LAYERS[layer](), eqx.is_inexact_array)

    def loss(params, xs):
        ys, state = jax.vmap(eqx.combine(params, static))(xs)
        leaves = jax.tree.leaves(state if of_last else ys)
        return sum(jnp.sum(jnp.abs(y) ** 2) for y in leaves)

    gradient = jax.grad(loss, (0, 1))
    b, t = export.symbolic_shape("b, t")
    types = (types_of(params), jax.ShapeDtypeStruct((b, t, 3), jnp.float32))
    program = export.export(jax.jit(gradient))(*types)
    for shape in ((2, 1, 3), (9, 70, 3)):
        xs = jr.normal(KEY, shape)
        for got, expected in zip(
            jax.tree.leaves(program.call(params, xs)),
            jax.tree.leaves(jax.jit(gradient)(params, xs)),
            strict=True,
        ):
            scale = jnp.max(jnp.abs(expected)) + 1e-6
            assert_close(got / scale, expected / scale, tolerance=1e-4)


def test_a_symbolic_number_of_tokens_is_in_chunks():
    """The largest array is as large as the logits of one chunk, and not of all tokens."""
    loss = lambda w, x, y: losses.linear_cross_entropy(x, w, y, chunk=4)
    (b,) = export.symbolic_shape("b")
    types = [((999, 3), jnp.float32), ((b, 3), jnp.float32), ((b,), jnp.int32)]
    types = [jax.ShapeDtypeStruct(*t) for t in types]
    text = str(jax.make_jaxpr(jax.grad(loss))(*types))
    assert "[4,999]" in text
    assert "b,999]" not in text


# ---------------------------------------------------------------- checks at run time


def implicit(a):
    residual = lambda y, a: y**3 + jnp.flip(y) - a
    newton = lambda _, y, a: y - residual(y, a) / (3 * y**2 + 1)
    run = lambda a: jax.lax.fori_loop(0, 40, lambda i, y: newton(i, y, a), a)
    return jnp.sum(eqg.implicit(residual)(run)(jnp.stack([a, a + 1])))


def fixed_point(a):
    return eqg.fixed_point(lambda y, a: jnp.cos(y) * a, 1.0, a).value


@pytest.mark.parametrize("fn", [implicit, fixed_point])
def test_a_check_at_run_time_calls_python(fn):
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        export.export(jax.jit(jax.grad(fn)))(jnp.float32(0.5))
