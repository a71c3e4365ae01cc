"""Spiking cells against a simulation in NumPy, plain JAX with a rule by hand, and snnTorch."""

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
from eqx_grads.nn._spiking import cell as arguments

from .fixtures import record_spiking as snntorch
from .fixtures.record_spiking import NEURONS, OF_MEMBRANES, OF_SPIKES, STEPS
from .helpers import assert_close


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
CASES = [(kind, "subtract") for kind in LEARNED]
CASES += [("Leaky", "zero"), ("Leaky", "none"), ("all", "zero"), ("RSynaptic", "none")]


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


def loss_of(spikes, membranes):
    """Of any two arrays in which the steps and the neurons come last."""
    of_spikes, of_membranes = jnp.asarray(OF_SPIKES, DTYPE), jnp.asarray(OF_MEMBRANES, DTYPE)
    return jnp.sum(spikes * of_spikes + membranes * of_membranes)


def loss(values, xs, **options):
    return loss_of(*run(make(values, **options), xs))


# ---------------------------------------------------------------- against NumPy


def simulate(xs, reset, *, beta, threshold, alpha=None, rho=None, weight_hh=None):
    """Spikes and potentials, neuron by neuron and from all of the past."""
    steps, n = xs.shape
    spikes, membranes = np.zeros((steps, n)), np.zeros((steps, n))
    inputs = np.zeros((steps, n))
    for t in range(steps):
        before = spikes[t - 1] if t else np.zeros(n)
        for k in range(n):
            inputs[t, k] = xs[t, k]
            if weight_hh is not None:
                inputs[t, k] += sum(weight_hh[k][before == 1])
            left = membranes[t - 1, k] if t else 0.0
            if before[k] and reset == "zero":
                left = 0.0
            current, limit = inputs[t, k], threshold[k]
            if alpha is not None:
                current = sum(alpha[k] ** (t - s) * inputs[s, k] for s in range(t + 1))
            if rho is not None:
                ages = [t - 1 - s for s in range(t) if spikes[s, k]]
                limit += 1.8 * sum(rho[k] ** age for age in ages)
            membranes[t, k] = beta[k] * left + current
            if before[k] and reset == "subtract":
                membranes[t, k] -= threshold[k]
            spikes[t, k] = membranes[t, k] > limit
    return spikes, membranes


@pytest.mark.parametrize(("kind", "reset"), CASES)
def test_values(kind, reset):
    spikes, membranes = run(make(parameters(kind), reset=reset), XS)
    values = {p: np.asarray(v, "float64") for p, v in parameters(kind).items()}
    fired, potentials = simulate(snntorch.XS.astype("float64"), reset, **values)
    assert 0.1 < fired.mean() < 0.9
    np.testing.assert_array_equal(spikes, fired)
    np.testing.assert_allclose(membranes, potentials, rtol=1e-5, atol=1e-6)


def test_what_does_not_fire():
    """A leaky integrator is a sum of the past, each part of it by its age."""
    beta = snntorch.PARAMETERS["beta"]
    ages = np.arange(STEPS)[::-1, None]

    def last(beta):
        return nn.LI(None, NEURONS, beta, learn="beta")(XS)[0][-1]

    np.testing.assert_allclose(
        last(jnp.asarray(beta)), np.sum(beta**ages * snntorch.XS, 0), rtol=1e-5
    )
    slope = ages * beta ** np.maximum(ages - 1, 0)
    grad = jax.grad(lambda beta: jnp.sum(last(beta)))(jnp.asarray(beta))
    np.testing.assert_allclose(grad, np.sum(slope * snntorch.XS, 0), rtol=1e-5)


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
    grad = jax.jit(jax.grad(ft.partial(loss, reset=reset), (0, 1)))
    of_values, of_xs = grad(values, XS)
    assert of_values.keys() == want["parameters"].keys()
    for parameter, expected in want["parameters"].items():
        np.testing.assert_allclose(of_values[parameter], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(of_xs, want["xs"], rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------- parameters


def test_a_decay_that_has_walked_out_comes_back():
    """It counts as the nearest bound, and has the gradient of that, also at the bound."""
    total = lambda beta: jnp.sum(run(nn.LIFCell(2, beta, learn="beta"), XS[:, :2])[1])
    grad = jax.jit(jax.value_and_grad(total))
    plain = lambda beta: total_by_hand(beta, np.asarray(XS[:, :2], "float64"))
    eps = 1e-6
    for beta, counts_as in ((1.3, 1.0), (1.0, 1.0), (-0.2, 0.0), (0.0, 0.0)):
        value, slope = grad(jnp.full(2, beta))
        np.testing.assert_allclose(value, plain(counts_as), rtol=1e-5)
        numerical = (plain(counts_as + eps) - plain(counts_as - eps)) / (2 * eps)
        # The surrogate has no part in this: no spike but those of the reset is in the sum.
        np.testing.assert_allclose(jnp.sum(slope), numerical, rtol=1e-4)


def total_by_hand(beta, xs):
    membranes = simulate(xs, "subtract", beta=np.full(2, beta), threshold=np.ones(2))[1]
    return membranes.sum()


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


def test_a_strength_that_is_learned():
    """Against a difference of the smooth primitive, for one step from a given trace."""

    def spikes(strength):
        cell = nn.LIFCell(3, 0.9, rho=0.8, strength=strength, learn=("strength",))
        trace = jnp.array([0.1, 0.7, 0.3])
        state = nn.LIFState(jnp.zeros(3), jnp.ones(3), None, trace)
        return jnp.sum(cell(jnp.ones(3), state).spikes)

    v = lambda strength: 1.9 - 1 - strength * 0.8 * np.array([0.1, 0.7, 0.3])
    smooth = lambda strength: np.sum(np.arctan(np.pi * v(strength)) / np.pi)
    want = (smooth(0.5 + 1e-6) - smooth(0.5 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(spikes)(jnp.array(0.5)), want, rtol=1e-5)


def test_layers_of_any_shape_and_any_surrogate():
    beta = np.linspace(0.1, 0.9, 2, dtype=DTYPE).reshape(2, 1, 1)
    surrogate = lambda v: jnp.exp(-jnp.abs(v))
    cell = nn.LIFCell((2, 3, 4), beta, alpha=0.5, surrogate=surrogate)
    x = jnp.ones((2, 3, 4))
    total = lambda x: jnp.sum(cell(x, cell.initial_state()).spikes)
    assert jnp.allclose(jax.grad(total)(x), 1.0)  # at the threshold
    after = cell(x, cell(x, cell.initial_state()))
    assert jnp.allclose(after.membrane[:, 0, 0], 1.5 + beta[:, 0, 0])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"alpha": 0.75, "recurrent": True}])
def test_a_state_keeps_its_dtypes(options):
    """A bfloat16 cell, float32 inputs: one step is that of float32, rounded at the end."""
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


def test_ensembles_and_files(tmp_path, getkey):
    options = {"recurrent": True, "learn": "beta"}
    make_cell = lambda beta, key: nn.LIFCell(NEURONS, beta, key=key, **options)
    betas, keys = jnp.array([0.3, 0.9]), jr.split(getkey(), 2)
    cells = eqx.filter_vmap(make_cell)(betas, keys)
    total = lambda cell: jnp.sum(run(cell, XS)[1])
    grads = eqx.filter_jit(eqx.filter_vmap(eqx.filter_grad(total)))(cells)
    one = eqx.filter_jit(eqx.filter_grad(total))(make_cell(betas[1], keys[1]))
    assert_close(jax.tree.map(lambda g: g[1], grads), one, tolerance=2e-5)
    eqx.tree_serialise_leaves(tmp_path / "cells", cells)
    like = jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, cells)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "cells", like), cells)


# ---------------------------------------------------------------- cost


@jax.custom_jvp
def step_by_hand(v):
    return jnp.heaviside(v, jnp.zeros((), v.dtype))


@step_by_hand.defjvp
def _step_by_hand_jvp(primals, tangents):
    (v,), (t_v,) = primals, tangents
    return step_by_hand(v), t_v / (1 + (jnp.pi * v) ** 2)


@pytest.mark.cost
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_scan_keeps_no_more_than_with_the_rule_by_hand(dtype):
    def with_cell(weight, inputs):
        cell = nn.LIFCell(50, 0.9, dtype=dtype)

        def tick(state, x):
            state = cell(weight @ x, state)
            return state, state.spikes

        return jnp.sum(jax.lax.scan(tick, cell.initial_state(), inputs)[1] ** 2)

    def plain(weight, inputs):
        def tick(state, x):
            s, u = state
            u = 0.9 * u + weight @ x - jax.lax.stop_gradient(s)
            s = step_by_hand(u - 1)
            return (s, u), s

        rest = jnp.zeros_like(weight[:, 0])
        return jnp.sum(jax.lax.scan(tick, (rest, rest), inputs)[1] ** 2)

    args = jnp.ones((50, 20), dtype), jnp.ones((40, 20), dtype)
    kept = lambda f: sum(x.nbytes for x in jax.tree.leaves(jax.vjp(f, *args)[1]))
    compiled = lambda f: jax.jit(jax.grad(f)).lower(*args).compile().memory_analysis()
    assert kept(with_cell) <= kept(plain)
    assert compiled(with_cell).temp_size_in_bytes <= compiled(plain).temp_size_in_bytes


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
    ({"surrogate": eqg.surrogates.atan}, "`surrogate` of `LIFCell` is not a surrogate"),
    ({"threshold": None, "rho": 0.9}, SPIKES_NOT),
    ({"threshold": None, "recurrent": True}, SPIKES_NOT),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_wrong_arguments(options, match):
    options = {"hidden_size": 3, "beta": 0.9, "key": jr.key(0), **options}
    with pytest.raises(RuleError, match=match):
        nn.LIFCell(**options)


def test_arguments_that_the_run_time_types_refuse():
    nn.LIFCell(3, 0.9, threshold=np.inf, reset="none")  # it never fires
    with pytest.raises(RuleError, match="`surrogate` of `LIFCell`"):
        arguments._as_surrogate("atan")
    with pytest.raises(RuleError, match="positive integer"):
        arguments._shape_of_layer([3, 4])
    with pytest.raises(RuleError, match="is not a number"):
        arguments._as_constant("beta", "0.9", (3,))


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
    for wrong in (nn.LIFState(None, jnp.zeros(3), jnp.zeros(3)), nn.LIFCell(3, 0.9)):
        with pytest.raises(RuleError, match="`state` of `LIFCell` is not a state of these"):
            eqx.filter_jit(lambda s: cell._check(jnp.ones(3), s))(wrong)


def test_inputs():
    cell = nn.LIFCell(3, 0.9, input_size=2, key=jr.key(0))
    for x in (jnp.ones(3), jnp.ones((2, 2)), jnp.ones(2, "complex64")):
        with pytest.raises(RuleError, match=r"`x` is (?s:.)*real numbers of shape \(2,\)"):
            cell(x, cell.initial_state())
