"""Spiking cells and layers against snnTorch, and against the cells in a loop written out."""

import functools as ft
import json

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError
from eqx_grads.nn._spiking import spiking_scan

from .fixtures import record_spiking as snntorch
from .fixtures.record_spiking import NEURONS, OF_MEMBRANES, OF_SPIKES
from .helpers import assert_close, temp_bytes
from .rules.recurrent import loss, losses_of_one_output, reference


BETA, RHO, ALPHA = ([0.9, 0.5, 0.3, 0.7], [0.95, 0.8, 0.6, 0.4], [0.2, 0.7, 0.4, 0.5])
KINDS = {"plain": {}, "all": {"rho": RHO, "alpha": ALPHA, "recurrent": True}}


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of two steps: five steps are two full ones and a short one."""
    monkeypatch.setattr(spiking_scan, "chunk_length", lambda xs, n: min(2, xs.shape[0]))


def make_layer(getkey, **options):
    """A layer, inputs that make its neurons fire, and a state."""
    options = {"dtype": "float64", **options}
    made = nn.LIF(3, 4, BETA, key=getkey(), **options)
    stronger = lambda x: 6 * x if eqx.is_array(x) and x.shape[-1:] == (3,) else x
    made = jax.tree.map(stronger, made)
    biases = lambda made: [cell.bias for cells in made.cells for cell in cells]
    made = eqx.tree_at(biases, made, replace_fn=lambda bias: bias + 0.5)
    xs = jr.normal(getkey(), (2, 5, 3), options["dtype"])
    _, state = made(xs)
    return made, xs, jax.tree.map(lambda s: jr.normal(getkey(), s.shape, s.dtype), state)


# ---------------------------------------------------------------- against the cells


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("options", [{}, {"reset": "zero"}])
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_gradient_of_one_output(kind, options, getkey):
    """A state where one field has a gradient, with and without the gradients of constants:
    a loop of the backward pass may have nothing to read."""
    with jax.enable_x64(True):
        args = make_layer(getkey, **KINDS[kind], **options)
        gradients = lambda run: eqx.filter_jit(
            lambda args: [eqx.filter_grad(loss)(args) for loss in losses_of_one_output(run)]
        )
        got, expected = (
            gradients(lambda layer, xs, s: layer(xs, s))(args),
            gradients(reference)(args),
        )
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-12)


@pytest.mark.thorough
@pytest.mark.usefixtures("chunks")
def test_neurons_after_a_convolution(getkey):
    """Neurons in the shape of an image, with a decay for each channel and a learned
    threshold."""
    with jax.enable_x64(True):
        beta = jnp.array([0.9, 0.5]).reshape(2, 1, 1)
        options = {
            "rho": 0.8,
            "strength": 0.3,
            "learn": ("beta", "threshold"),
            "dtype": "float64",
        }
        layer = nn.LIF(None, (2, 3, 2), beta, num_layers=2, **options)
        xs = 1 + 3 * jr.normal(getkey(), (2, 5, 2, 3, 2))
        _, state = layer(xs)

        def by_step(layer, xs, state):
            cells = [cell for (cell,) in layer.cells]
            return nn.Recurrent(cells, checkpoint=3)(xs, state)

        args = (layer, xs, state)
        assert 0.1 < jnp.mean(layer(xs)[0]) < 0.9
        both = lambda f: eqx.filter_jit(lambda a: (f(*a), eqx.filter_grad(loss(f))(a)))
        call = lambda layer, xs, state: layer(xs, state)
        assert_close(both(call)(args), both(by_step)(args), tolerance=1e-12)
        assert_close(layer(xs[0])[0], layer(xs)[0][0], tolerance=1e-12)
        with pytest.raises(RuleError, match=r"of the wrong size(?s:.)*is \(2, 3, 2\)"):
            layer(xs[:, :, :, :2])
        with pytest.raises(RuleError, match="was given `xs` with 3 axes"):
            layer(xs[0, 0])


# ---------------------------------------------------------------- transformations, dtypes


def test_what_is_frozen_costs_nothing(getkey):
    # So large that the gradients of the weights are products, too.
    layer = nn.LIF(64, 64, 0.9, recurrent=True, key=getkey())
    xs = jr.normal(getkey(), (16, 32, 64))
    products = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("dot_general")
    total = lambda layer, xs: jnp.sum(layer(xs)[0])
    everything = products(eqx.filter_grad(lambda args: total(*args)), (layer, xs))
    assert products(eqx.filter_grad(total), layer, xs) == everything - 1
    assert products(jax.grad(total, 1), layer, xs) < everything - 1


@pytest.mark.usefixtures("cpu")
def test_chunks_on_an_accelerator(monkeypatch, getkey):
    """A loop in a loop costs launches: there is one for the steps of a chunk, and none for the
    chunks of a sequence like these, which has twenty on a CPU."""
    layer = nn.LIF(32, 256, 0.9, learn="beta", time_major=True, key=getkey())
    xs = jnp.ones((100, 64, 32))
    loops = lambda: str(
        jax.make_jaxpr(
            lambda b: eqx.filter_grad(
                lambda b: jnp.sum(eqx.tree_at(lambda l: l.cells[0][0].beta, layer, b)(xs)[0])
            )(b)
        )(layer.cells[0][0].beta)
    ).count(" scan[")
    assert spiking_scan.chunk_length(xs, 256) == 5
    on_cpu = loops()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert spiking_scan.chunk_length(xs, 256) == 100
    jax.clear_caches()
    assert loops() < on_cpu


# ---------------------------------------------------------------- cost


@pytest.mark.cost
@pytest.mark.parametrize(
    ("options", "most"),
    [({"learn": ("beta", "threshold")}, 0.6), ({}, 1.3), ({"rho": 0.9}, 1.3)],
)
def test_memory(options, most, getkey):
    """With learned constants, autodiff saves the potentials, the spikes and the slopes. Without
    them it saves the slopes, and the layer the potentials."""
    xs, ct = jnp.ones((1000, 16, 32)), jnp.ones((1000, 16, 64))
    layer = nn.LIF(32, 64, 0.9, time_major=True, key=getkey(), **options)
    arrays, static = eqx.partition(layer, eqx.is_array)

    def plain(layer, xs):
        ((cell,),) = layer.cells

        def step(state, x):
            state = jax.vmap(cell)(x, state)
            return state, state.spikes

        zero = jax.tree.map(lambda s: jnp.zeros((16, *s.shape)), cell.initial_state())
        return jax.lax.scan(step, zero, xs)[1]

    def of(run):
        def train(arrays, xs):
            both = lambda arrays, xs: run(eqx.combine(arrays, static), xs)
            spikes, pull_back = jax.vjp(both, arrays, xs)
            return spikes, pull_back(ct)

        return temp_bytes(train, arrays, xs)

    assert of(lambda layer, xs: layer(xs)[0]) < most * of(plain)


# ---------------------------------------------------------------- cells

DTYPE = jnp.zeros(()).dtype
XS = jnp.asarray(snntorch.XS, DTYPE)
# The kinds of neurons, by the names of snnTorch where it has them, and what they learn.
LEARNED = {
    "Leaky": ("beta", "threshold"),
    "adaptive": ("beta", "rho", "threshold"),
    "Synaptic": ("alpha", "beta", "threshold"),
    "RLeaky": ("beta", "threshold", "weight_hh"),
    "adaptive, recurrent": ("beta", "rho", "threshold", "weight_hh"),
    "RSynaptic": ("alpha", "beta", "threshold", "weight_hh"),
    "all": ("alpha", "beta", "rho", "threshold", "weight_hh"),
}


def parameters(kind):
    return {p: jnp.asarray(snntorch.PARAMETERS[p], DTYPE) for p in LEARNED[kind]}


def make(values, **options):
    """A cell that learns these constants."""
    values = dict(values)
    weight = values.pop("weight_hh", None)
    options |= {**values, "learn": tuple(values)}
    if weight is None:
        return nn.LIFCell(NEURONS, **options)
    cell = nn.LIFCell(NEURONS, recurrent=True, key=jr.key(0), **options)
    return eqx.tree_at(lambda cell: cell.weight_hh, cell, weight)


def run(cell, xs):
    def step(state, x):
        state = cell(x, state)
        return state, (state.spikes, state.membrane)

    return jax.lax.scan(step, cell.initial_state(), xs)[1]


def weighted(spikes, membranes):
    """Of any two arrays in which the steps and the neurons come last."""
    of_spikes, of_membranes = jnp.asarray(OF_SPIKES, DTYPE), jnp.asarray(OF_MEMBRANES, DTYPE)
    return jnp.sum(spikes * of_spikes + membranes * of_membranes)


def loss_of(values, xs, **options):
    return weighted(*run(make(values, **options), xs))


# ---------------------------------------------------------------- against snnTorch

RECORDED = json.loads(snntorch.PATH.read_text())
assert RECORDED.pop("version") == "1.0.0"


@pytest.mark.parametrize("case", RECORDED)
def test_the_numbers_of_snntorch(case):
    kind, reset = case.split(", ")
    want = RECORDED[case]
    values = parameters(kind)
    spikes, membranes = run(make(values, reset=reset), XS)
    np.testing.assert_array_equal(spikes, want["spikes"])
    np.testing.assert_allclose(membranes, want["membranes"], rtol=1e-5, atol=1e-6)
    grad = jax.jit(jax.grad(ft.partial(loss_of, reset=reset), (0, 1)))
    of_values, of_xs = grad(values, XS)
    assert of_values.keys() == want["parameters"].keys()
    for parameter, expected in want["parameters"].items():
        np.testing.assert_allclose(of_values[parameter], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(of_xs, want["xs"], rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------- parameters


def test_what_is_learned_and_what_is_not():
    total = lambda cell: jnp.sum(run(cell, XS)[1])
    beta = snntorch.PARAMETERS["beta"].astype(DTYPE)
    array = jnp.asarray(beta)
    leaves = lambda cell: jax.tree.leaves(eqx.filter(cell, eqx.is_inexact_array))
    assert leaves(nn.LIFCell(NEURONS, 0.9)) == []
    assert [b.shape for b in leaves(nn.LIFCell(NEURONS, 0.9, learn="beta"))] == [()]
    grads = eqx.filter_grad(total)(nn.LIFCell(NEURONS, array, threshold=0.5))
    assert not grads.beta.any()
    # As any constant, it may also be an array of NumPy, or a list.
    for same in (beta, beta.tolist()):
        got, want = (run(nn.LIFCell(NEURONS, b), XS) for b in (same, array))
        assert_close(got, want, tolerance=2e-5)
    # The slope of a surrogate is learned if it is an array.
    cell = nn.LIFCell(NEURONS, 0.9, surrogate=eqg.surrogates.atan(jnp.array(2.0)))
    of_spikes = eqx.filter_grad(lambda cell: jnp.sum(run(cell, XS)[0] * XS))
    assert of_spikes(cell).surrogate.slope != 0


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"alpha": 0.75, "recurrent": True}])
def test_a_state_keeps_its_dtypes(options):
    """A bfloat16 cell, float32 inputs: one step is computed in float32, and rounded at the
    end."""
    cell = nn.LIFCell(NEURONS, 0.9, dtype="bfloat16", key=jr.key(0), **options)
    xs = XS.astype("float32")
    start = cell(1.3 * xs[0], cell.initial_state())
    wide = jax.tree.map(lambda s: s.astype("float32"), start)
    exact = cell(xs[1], wide)
    rounded = jax.tree.map(lambda s: s.astype("bfloat16"), exact)
    assert_close(cell(xs[1], start), rounded, tolerance=0.0)
    assert not jnp.array_equal(rounded.membrane.astype("float32"), exact.membrane)
    emitted, last = nn.Recurrent(cell)(xs)
    np.testing.assert_array_equal(emitted, run(cell, xs)[0])
    assert 0 < jnp.mean(emitted.astype("float32")) < 1
    assert {s.dtype for s in jax.tree.leaves((emitted, last))} == {jnp.dtype("bfloat16")}
    # Each array keeps its own, and inputs in less precision or of integers change nothing.
    mixed = eqx.tree_at(lambda s: s.membrane, start, wide.membrane)
    for x in (xs[0], xs[0].astype("float16"), jnp.ones(NEURONS, "int32")):
        after = cell(x, mixed)
        assert after.spikes.dtype == "bfloat16"
        assert after.membrane.dtype == "float32"


# ---------------------------------------------------------------- errors

SPIKES_NOT = "no threshold, and an option of neurons that spike"
WRONG = [
    ({"beta": 1.1}, r"`beta` of `LIFCell` is not from zero to one(?s:.)*is 1\.1"),
    ({"beta": [0.5, np.nan, 0.5]}, "`beta` of `LIFCell` is not from zero to one"),
    ({"rho": -0.1}, "`rho` of `LIFCell` is not from zero to one"),
    ({"threshold": [1.0, 1.0, np.nan]}, "`threshold` of `LIFCell` is not a number"),
    ({"threshold": np.ones(2)}, r"`threshold` that does not fit(?s:.)*\(3,\) neurons"),
    ({"alpha": ["a", "b", "c"]}, "The `alpha` of `LIFCell` is not a number"),
    ({"alpha": jnp.ones(3, "complex64")}, "The `alpha` of `LIFCell` is not a number"),
    ({"alpha": [[0.5], 0.5, 0.5]}, "The `alpha` of `LIFCell` is not a number"),
    ({"beta": True}, "The `beta` of `LIFCell` is not a number"),
    ({"learn": "rho"}, r"`learn` of `LIFCell` is not names(?s:.)*of 'beta', 'threshold'"),
    ({"learn": ("beta", "weight")}, "`learn` of `LIFCell` is not names of constants"),
    ({"dtype": "int8"}, "`dtype` of `LIFCell` is not a real floating one"),
    ({"hidden_size": 0}, "`hidden_size` of `LIFCell` is not a positive integer"),
    ({"hidden_size": (3, True)}, "`hidden_size` of `LIFCell` is not a positive integer"),
    ({"hidden_size": (3, 4), "recurrent": True}, "not a number of neurons"),
    ({"hidden_size": (3, 4), "input_size": 2}, "not a number of neurons"),
    ({"input_size": -1}, "`input_size` is -1"),
    ({"input_size": 2, "key": None}, "`key` of `LIFCell` is not a random key"),
    ({"surrogate": eqg.surrogates.atan}, r"`surrogate` of `LIFCell` is(?s:.)*atan\(\)`"),
    ({"threshold": None, "rho": 0.9}, SPIKES_NOT),
    ({"threshold": None, "recurrent": True}, SPIKES_NOT),
]


def test_wrong_arguments():
    for options, match in WRONG:
        options = {"hidden_size": 3, "beta": 0.9, "key": jr.key(0), **options}
        with pytest.raises(RuleError, match=match):
            nn.LIFCell(**options)


@pytest.mark.parametrize("options", [{"rho": 0.9, "alpha": 0.9}, {"threshold": None}])
def test_every_array_of_the_state(options):
    cell = nn.LIFCell(3, 0.9, **options)
    state = cell.initial_state()
    names = [name for name in vars(state) if getattr(state, name) is not None]
    for name in names:
        put = lambda x, n=name: eqx.tree_at(lambda s: getattr(s, n), state, x)
        for wrong in (jnp.zeros((2, 3)), jnp.zeros(()), jnp.zeros(3, "int32"), 0.0):
            expected = rf"does not fit its neurons(?s:.)*`state\.{name}` is (?s:.)*of shape \(3"
            with pytest.raises(RuleError, match=expected):
                cell(jnp.ones(3), put(wrong))
    # For each example of a batch, that is.
    batch = jax.tree.map(lambda s: jnp.zeros((2, 3)), state)
    assert jax.vmap(cell)(jnp.ones((2, 3)), batch).membrane.shape == (2, 3)
