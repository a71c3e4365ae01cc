"""Spiking cells and layers against snnTorch, and against the cells in a loop written out."""

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
from .rules.recurrent import losses_of_one_output, reference


BETA, RHO, ALPHA = ([0.9, 0.5, 0.3, 0.7], [0.95, 0.8, 0.6, 0.4], [0.2, 0.7, 0.4, 0.5])
KINDS = {"plain": {}, "all": {"rho": RHO, "alpha": ALPHA, "recurrent": True}}


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of two steps: five steps are two full ones and a short one."""
    monkeypatch.setattr(spiking_scan, "chunk_length", lambda xs, n: min(2, xs.shape[0]))


# ---------------------------------------------------------------- against the cells


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reset", ["subtract", "zero"])
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_gradient_of_one_output(kind, reset, getkey):
    """A state where one field has a gradient: a loop of the backward pass may have nothing to
    read."""
    with jax.enable_x64(True):
        options = {**KINDS[kind], "reset": reset, "dtype": "float64"}
        layer = nn.LIF(3, 4, BETA, key=getkey(), **options)
        layer = jax.tree.map(lambda x: 3 * x if eqx.is_array(x) else x, layer)
        xs = jr.normal(getkey(), (2, 5, 3))
        state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape), layer(xs)[1])
        gradients = lambda run: eqx.filter_jit(
            lambda args: [eqx.filter_grad(loss)(args) for loss in losses_of_one_output(run)]
        )
        args = layer, xs, state
        got = gradients(lambda layer, xs, s: layer(xs, s))(args)
        expected = gradients(reference)(args)
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-12)


@pytest.mark.usefixtures("chunks")
def test_outputs_alone(getkey):
    """The last state has no cotangent. Neurons in the shape of an image, as after a
    convolution, have a decay for each channel."""
    learn, beta = ("beta", "rho", "threshold", "strength"), np.reshape([0.9, 0.5], (2, 1, 1))
    options = {"rho": 0.8, "learn": learn, "dtype": "float32"}
    image = nn.LIF(None, (2, 3, 2), beta, **options), (2, 5, 2, 3, 2)
    plain = nn.LIF(4, 4, 0.9, recurrent=True, dtype="float32", key=getkey()), (2, 5, 4)
    # With an `output`, the cells are called.
    cells = lambda layer: nn.Recurrent(layer.cells, output=lambda state: state.spikes)
    runs = lambda layer, *args: layer(*args), lambda layer, *args: cells(layer)(*args)
    for layer, shape in (image, plain):
        xs = 1 + 3 * jr.normal(getkey(), shape, "float32")
        args = layer, xs, jax.tree.map(lambda s: s + 0.3, layer(xs)[1])
        assert 0.1 < jnp.mean(layer(xs)[0]) < 0.9
        loss = lambda f, xs=xs: lambda of: jnp.sum(jnp.sin(f(*of)[0] + xs))
        both = lambda args, loss=loss: [eqx.filter_grad(loss(f))(args) for f in runs]
        assert_close(*eqx.filter_jit(both)(args), tolerance=1e-5)


# ---------------------------------------------------------------- cost


@pytest.mark.usefixtures("cpu")
def test_chunks_on_an_accelerator(monkeypatch, getkey):
    """A loop in a loop costs launches: there is one for the steps of a chunk, and none for the
    chunks of a sequence like these, which has twenty on a CPU."""
    layer = nn.LIF(32, 256, 0.9, learn="beta", time_major=True, key=getkey())
    xs = jnp.ones((100, 64, 32))
    grad = eqx.filter_grad(lambda layer: jnp.sum(layer(xs)[0]))
    loops = lambda: str(eqx.filter_make_jaxpr(grad)(layer)[0]).count(" scan[")
    assert spiking_scan.chunk_length(xs, 256) == 5
    on_cpu = loops()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert spiking_scan.chunk_length(xs, 256) == 100
    assert spiking_scan.chunk_length(jnp.ones((4096, 64, 0)), 256) == 128
    jax.clear_caches()
    assert loops() < on_cpu


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
        both = lambda arrays, xs: run(eqx.combine(arrays, static), xs)
        train = lambda arrays, xs: (lambda y, pull: (y, pull(ct)))(*jax.vjp(both, arrays, xs))
        return temp_bytes(train, arrays, xs)

    assert of(lambda layer, xs: layer(xs)[0]) < most * of(plain)


# ---------------------------------------------------------------- against snnTorch

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
RECORDED = json.loads(snntorch.PATH.read_text())
assert RECORDED.pop("version") == "1.0.0"


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


@pytest.mark.parametrize("case", RECORDED)
def test_the_numbers_of_snntorch(case):
    kind, reset = case.split(", ")
    want = RECORDED[case]
    values = {p: jnp.asarray(snntorch.PARAMETERS[p], DTYPE) for p in LEARNED[kind]}
    weights = jnp.asarray(OF_SPIKES, DTYPE), jnp.asarray(OF_MEMBRANES, DTYPE)

    def loss_of(values, xs):
        spikes, membranes = run(make(values, reset=reset), xs)
        total = jnp.sum(spikes * weights[0] + membranes * weights[1])
        return total, (spikes, membranes)

    grad = jax.jit(jax.grad(loss_of, (0, 1), has_aux=True))
    (of_values, of_xs), (spikes, membranes) = grad(values, XS)
    np.testing.assert_array_equal(spikes, want["spikes"])
    np.testing.assert_allclose(membranes, want["membranes"], rtol=1e-5, atol=1e-6)
    assert of_values.keys() == want["parameters"].keys()
    for parameter, expected in want["parameters"].items():
        np.testing.assert_allclose(of_values[parameter], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(of_xs, want["xs"], rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------- parameters, dtypes


def test_what_is_learned_and_what_is_not():
    total = lambda cell: jnp.sum(run(cell, XS)[1])
    beta = snntorch.PARAMETERS["beta"].astype(DTYPE)
    leaves = lambda cell: jax.tree.leaves(eqx.filter(cell, eqx.is_inexact_array))
    assert leaves(nn.LIFCell(NEURONS, 0.9)) == []
    assert [b.shape for b in leaves(nn.LIFCell(NEURONS, 0.9, learn="beta"))] == [()]
    grads = eqx.filter_grad(total)(nn.LIFCell(NEURONS, jnp.asarray(beta), threshold=0.5))
    assert not grads.beta.any()
    # As any constant, it may also be an array of NumPy, or a list.
    got, want = (run(nn.LIFCell(NEURONS, b), XS) for b in (beta.tolist(), jnp.asarray(beta)))
    assert_close(got, want, tolerance=2e-5)
    # The slope of a surrogate is learned if it is an array.
    cell = nn.LIFCell(NEURONS, 0.9, surrogate=eqg.surrogates.atan(jnp.array(2.0)))
    of_spikes = eqx.filter_grad(lambda cell: jnp.sum(run(cell, XS)[0] * XS))
    assert of_spikes(cell).surrogate.slope != 0
    half = nn.LIFCell(NEURONS, 0.9, learn="beta", dtype="bfloat16")
    after = jax.eval_shape(half, XS[0], half.initial_state())
    assert {s.dtype for s in [*leaves(half), *jax.tree.leaves(after)]} == {
        jnp.dtype("bfloat16")
    }


@pytest.mark.thorough
def test_a_state_keeps_its_dtypes():
    """A bfloat16 cell, float32 inputs: one step is computed in float32, and rounded at the
    end. Each array keeps its own."""
    options = {"alpha": 0.75, "recurrent": True, "dtype": "bfloat16", "key": jr.key(0)}
    cell, xs = nn.LIFCell(NEURONS, 0.9, **options), XS.astype("float32")
    start = cell(1.3 * xs[0], cell.initial_state())
    exact = cell(xs[1], jax.tree.map(lambda s: s.astype("float32"), start))
    rounded = jax.tree.map(lambda s: s.astype("bfloat16"), exact)
    assert_close(cell(xs[1], start), rounded, tolerance=0.0)
    # A layer computes in the common dtype, as `GRU` does.
    assert {s.dtype for s in jax.tree.leaves(nn.Recurrent(cell)(xs))} == {jnp.dtype("float32")}
    mixed = eqx.tree_at(lambda s: s.membrane, start, exact.membrane)
    for x in (xs[0].astype("float16"), jnp.ones(NEURONS, "int32")):
        after = cell(x, mixed)
        assert (after.spikes.dtype, after.membrane.dtype) == ("bfloat16", "float32")


# ---------------------------------------------------------------- errors

WRONG = [
    ({"surrogate": eqg.surrogates.atan}, r"`surrogate` of `LIFCell` is(?s:.)*atan\(\)`"),
    ({"threshold": None, "recurrent": True}, "`threshold` of `LIFCell`(?s:.)*do not spike"),
]


def test_wrong_arguments():
    for options, match in WRONG:
        options = {"hidden_size": 3, "beta": 0.9, "key": jr.key(0), **options}
        with pytest.raises(RuleError, match=match):
            nn.LIFCell(**options)
    cell = nn.LIFCell(3, 0.9, rho=0.9, alpha=0.9)
    state = cell.initial_state()
    for name in vars(state):
        for wrong in (jnp.zeros((2, 3)), jnp.zeros(3, "int32"), 0.0):
            put = eqx.tree_at(lambda s, n=name: getattr(s, n), state, wrong)
            match = rf"does not fit its neurons(?s:.)*`state\.{name}` is (?s:.)*of shape \(3"
            with pytest.raises(RuleError, match=match):
                cell(jnp.ones(3), put)
    image = nn.LIF(None, (2, 3, 2), 0.9)
    with pytest.raises(RuleError, match=r"of the wrong size(?s:.)*is \(2, 3, 2\)"):
        image(jnp.ones((5, 2, 3, 1)))
