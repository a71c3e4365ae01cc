"""`vmap` over an explicit mesh axis: loops whose condition differs between examples, and rows
that are looked up by sharded indices. And recurrent layers with sharded weights."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax.sharding import PartitionSpec as Spec

from .many_devices import EXPLICIT_MESH, put
from .test_many_devices import _arguments, _of_layer, _programs, LAYERS, LINEAR_LAYERS


EVERY_LAYER = {**LAYERS, **LINEAR_LAYERS}


def _check(fn, *args):
    """Value, tangent and gradients of a function of one example, for one on each device."""

    def both(*args):
        of_batch = jax.vmap(fn)
        loss = lambda *args: jnp.sum(jnp.sin(of_batch(*args)))
        return jax.jvp(of_batch, args, args), jax.grad(loss, tuple(range(len(args))))(*args)

    expected = jax.jit(both)(*args)
    with jax.set_mesh(EXPLICIT_MESH):
        got = jax.jit(both)(*(put(x, Spec("i"), EXPLICIT_MESH) for x in args))
        for grad in got[1]:
            assert jax.typeof(grad).sharding.spec[0] == "i"
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2),
    reason="JAX 0.10.0 can't select between constants under `vmap` over an explicit axis",
)
def test_fixed_point():
    """The solver's counters are constants, whose types have no mesh."""
    weight = 0.3 * jnp.eye(3) + 0.1
    solve = lambda x: eqg.fixed_point(lambda y, x: jnp.tanh(weight @ y) + x, x, x).value
    _check(solve, jr.normal(jr.key(0), (8, 3)))


@pytest.mark.parametrize("online", [True, "e-prop"])
def test_gradient_of_an_online_scan(online):
    """The sums of the gradients start from constants."""

    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(h * w + x), h * h)
        h, ys = eqg.filter_scan(step, jnp.zeros(3), xs, online=online)
        return jnp.sum(ys) + jnp.sum(h)

    w, xs = jnp.linspace(0.1, 0.9, 3), jr.normal(jr.key(0), (8, 5, 3))
    gradient = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
    expected = gradient(w, xs)
    with jax.set_mesh(EXPLICIT_MESH):
        got = gradient(w, put(xs, Spec("i"), EXPLICIT_MESH))
        assert jax.typeof(got).sharding.spec[0] == "i"
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)


@pytest.mark.slow
def test_implicit_with_a_loop():
    @eqg.implicit(lambda y, x: y**2 - x)
    def root(x):
        far = lambda state: (jnp.abs(state[0] ** 2 - x) > 1e-5) & (state[1] < 30)
        step = lambda state: ((state[0] + x / state[0]) / 2, state[1] + 1)
        return eqg.filter_while_loop(far, step, (jnp.ones(()), 0))[0]

    _check(root, jnp.linspace(0.5, 4.0, 8))


@pytest.mark.parametrize("is_shared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_vector_quantize(is_shared):
    codebook = jr.normal(jr.key(0), (5, 3))
    z = jr.normal(jr.key(1), (8, 2, 3))
    if is_shared:
        _check(lambda z: eqg.ste.vector_quantize(z, codebook)[0], z)
    else:
        codebooks = jr.normal(jr.key(2), (8, 5, 3))
        _check(lambda z, c: eqg.ste.vector_quantize(z, c)[0], z, codebooks)


def test_gradient_of_the_codebook_of_a_layer():
    """Its losses take the entries by sharded indices."""
    layer = eqg.nn.VectorQuantizer(5, 3, ema=False, key=jr.key(0))
    z = jr.normal(jr.key(1), (8, 3))

    def loss(args):
        layer, z = args
        parts = layer.quantize(z)
        return jnp.sum(jnp.sin(parts.value)) + parts.codebook_loss + parts.commitment_loss

    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    expected = gradient((layer, z))
    assert jnp.any(expected[0].codebook != 0)
    with jax.set_mesh(EXPLICIT_MESH):
        got = gradient((layer, put(z, Spec("i"), EXPLICIT_MESH)))
    eqgt.assert_trees_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "name",
    [n if n == "GRU" else pytest.param(n, marks=pytest.mark.slow) for n in EVERY_LAYER],
)
def test_weights_over_an_explicit_axis(name, axis):
    """They are gathered, and their gradients are sharded as they are."""
    (params, xs, ct), _, static = _arguments(EVERY_LAYER[name], "batch")
    forward, reverse = _programs(static, _of_layer)
    expected = reverse(params, xs, ct), forward(params, xs, ct)
    is_wide = lambda x: x.ndim > axis and x.shape[axis] % 8 == 0
    spec_of = lambda x: Spec(*(None,) * axis, "i") if is_wide(x) else Spec()
    with jax.set_mesh(EXPLICIT_MESH):
        weights = jax.tree.map(lambda x: put(x, spec_of(x), EXPLICIT_MESH), params)
        batch = Spec(None, "i")
        many = weights, put(xs, batch, EXPLICIT_MESH), put(ct, batch, EXPLICIT_MESH)
        got = reverse(*many), forward(*many)
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)
    grads, _ = got[0][1]
    for grad, weight in zip(jax.tree.leaves(grads), jax.tree.leaves(weights), strict=True):
        assert grad.sharding.is_equivalent_to(weight.sharding, weight.ndim)


@pytest.mark.parametrize(
    "name", ["MinGRU", *(pytest.param(n, marks=pytest.mark.slow) for n in ("MinLSTM", "LRU"))]
)
def test_units_over_an_explicit_axis(name):
    """With a batch that is not sharded, nothing is gathered: each device has some units."""
    (params, xs, _), _, static = _arguments(LINEAR_LAYERS[name], "batch")
    run = lambda params, xs: _of_layer(eqx.combine(params, static))(xs)
    loss = lambda params, xs: jnp.sum(jnp.sin(run(params, xs)))
    both = jax.jit(lambda *args: (run(*args), jax.grad(loss, (0, 1))(*args)))
    expected = both(params, xs)
    is_wide = lambda x: x.ndim > 0 and x.shape[0] % 8 == 0
    spec_of = lambda x: Spec("i") if is_wide(x) else Spec()
    with jax.set_mesh(EXPLICIT_MESH):
        weights = jax.tree.map(lambda x: put(x, spec_of(x), EXPLICIT_MESH), params)
        got = both(weights, put(xs, Spec(), EXPLICIT_MESH))
    assert got[0].sharding.spec == Spec(None, None, "i")
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [Spec(None, None, "i"), Spec("i", None, None)])
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: eqg.nn.GRU(8, 32, key=jr.key(0)), id="GRU"),
        pytest.param(lambda: eqg.nn.LSTM(8, 3, key=jr.key(0)), id="LSTM"),
        pytest.param(lambda: eqg.nn.RNN(8, 3, key=jr.key(0)), id="RNN"),
        pytest.param(lambda: eqg.nn.LIF(8, 3, beta=0.9, key=jr.key(0)), id="LIF"),
    ],
)
def test_inputs_whose_features_are_sharded(layer, spec):
    """With weights that are not: the gradient of each has its own sharding, also where the
    steps are in several chunks, as those of the GRU are."""
    params, static = eqx.partition(layer(), eqx.is_inexact_array)
    loss = lambda params, xs: jnp.sum(eqx.combine(params, static)(xs)[0] ** 2)
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    xs = jr.normal(jr.key(1), (8, 40, 8))
    expected = gradient(params, xs)
    with jax.set_mesh(EXPLICIT_MESH):
        sharded = put(xs, spec, EXPLICIT_MESH)
        got = gradient(params, sharded)
        assert jax.typeof(got[1][1]).sharding.spec == jax.typeof(sharded).sharding.spec
    eqgt.assert_trees_close(got, expected, tolerance=1e-4)


def test_a_cotangent_that_is_sharded_otherwise_than_its_value():
    @eqg.custom_vjp
    def matvec(w, x):
        return w @ x

    matvec.def_fwd(lambda w, x: (matvec(w, x), (w, x)))
    matvec.def_bwd(lambda r, ct: (jnp.outer(ct, r[1]), ct @ r[0]))
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(matvec(w, x) ** 2), (0, 1)))
    w, x = jr.normal(jr.key(0), (3, 8)), jr.normal(jr.key(1), (8,))
    expected = jax.grad(lambda w, x: jnp.sum((w @ x) ** 2), (0, 1))(w, x)
    with jax.set_mesh(EXPLICIT_MESH):
        got = gradient(w, put(x, Spec("i"), EXPLICIT_MESH))
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)
