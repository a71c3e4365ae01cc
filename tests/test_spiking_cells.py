"""Spiking cells against a simulation in NumPy, plain JAX with a rule by hand, and snnTorch."""

import dataclasses
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
from eqx_grads.nn._spiking import parameters as checks

from .fixtures import record_spiking as snntorch
from .fixtures.record_spiking import NEURONS, OF_MEMBRANES, OF_SPIKES, STEPS
from .helpers import assert_close, checking_leaks


DTYPE = jnp.zeros(()).dtype
XS = jnp.asarray(snntorch.XS, DTYPE)
LEARNED = {
    "LIFCell": ("beta", "threshold"),
    "ALIFCell": ("beta", "rho", "threshold"),
    "CuBaLIFCell": ("alpha", "beta", "threshold"),
    "RLIFCell": ("beta", "threshold", "weight_hh"),
    "RALIFCell": ("beta", "rho", "threshold", "weight_hh"),
    "RCuBaLIFCell": ("alpha", "beta", "threshold", "weight_hh"),
}
CASES = [(name, "subtract") for name in LEARNED]
CASES += [("LIFCell", "zero"), ("LIFCell", "none")]
CASES += [("RALIFCell", "zero"), ("RCuBaLIFCell", "none")]


def parameters(name):
    return {p: jnp.asarray(snntorch.PARAMETERS[p], DTYPE) for p in LEARNED[name]}


def make(name, values, **options):
    """The cell, with everything learned that can be."""
    values = dict(values)
    weight = values.pop("weight_hh", None)
    options |= {f"learn_{p}": True for p in values}
    if weight is None:
        return getattr(nn, name)(NEURONS, **values, **options)
    cell = getattr(nn, name)(NEURONS, **values, **options, key=jr.key(0))
    return eqx.tree_at(lambda cell: cell.weight_hh, cell, weight)


def run(cell, xs, scan=jax.lax.scan):
    def step(state, x):
        state = cell(x, state)
        return state, (state.spikes, state.membrane)

    return scan(step, cell.initial_state(), xs)[1]


def loss_of(spikes, membranes):
    """Of any two arrays in which the steps and the neurons come last."""
    of_spikes, of_membranes = jnp.asarray(OF_SPIKES, DTYPE), jnp.asarray(OF_MEMBRANES, DTYPE)
    return jnp.sum(spikes * of_spikes + membranes * of_membranes)


def loss(values, xs, name, scan=jax.lax.scan, **options):
    return loss_of(*run(make(name, values, **options), xs, scan))


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


@pytest.mark.parametrize(("name", "reset"), CASES)
def test_values(name, reset):
    spikes, membranes = run(make(name, parameters(name), reset=reset), XS)
    values = {p: np.asarray(v, "float64") for p, v in parameters(name).items()}
    fired, potentials = simulate(snntorch.XS.astype("float64"), reset, **values)
    assert 0.1 < fired.mean() < 0.9
    np.testing.assert_array_equal(spikes, fired)
    np.testing.assert_allclose(membranes, potentials, rtol=1e-5, atol=1e-6)


def test_what_does_not_fire():
    """A leaky integrator is a sum of the past, each part of it by its age."""
    beta = snntorch.PARAMETERS["beta"]
    ages = np.arange(STEPS)[::-1, None]

    def last(beta):
        layer = nn.Recurrent(nn.LICell(NEURONS, beta, learn_beta=True))
        return layer(XS)[0][-1]

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
    name, reset = case.split(", ")
    want = RECORDED[case]
    values = parameters(name)
    spikes, membranes = run(make(name, values, reset=reset), XS)
    np.testing.assert_array_equal(spikes, want["spikes"])
    np.testing.assert_allclose(membranes, want["membranes"], rtol=1e-5, atol=1e-6)
    grad = jax.jit(jax.grad(ft.partial(loss, name=name, reset=reset), (0, 1)))
    of_values, of_xs = grad(values, XS)
    assert of_values.keys() == want["parameters"].keys()
    for parameter, expected in want["parameters"].items():
        np.testing.assert_allclose(of_values[parameter], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(of_xs, want["xs"], rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------- against a rule by hand


@jax.custom_jvp
def step_by_hand(v):
    return jnp.heaviside(v, jnp.zeros((), v.dtype))


@step_by_hand.defjvp
def _step_by_hand_jvp(primals, tangents):
    (v,), (t_v,) = primals, tangents
    return step_by_hand(v), t_v / (1 + (jnp.pi * v) ** 2)


def by_hand(values, xs, name, reset="subtract", detach_reset=True):
    """All cells in one, of which each has a part."""
    del name
    beta, threshold = values["beta"], values["threshold"]
    zero = jnp.zeros_like(threshold)
    rho = values.get("rho", zero)
    alpha = values.get("alpha", zero)
    strength = 1.8 if "rho" in values else 0.0

    def step(state, x):
        s, i, u, a = state
        if "weight_hh" in values:
            x = x + values["weight_hh"] @ s
        i = alpha * i + x
        a = rho * a + s
        last = jax.lax.stop_gradient(s) if detach_reset else s
        if reset == "zero":
            u = beta * (u * (1 - last)) + i
        else:
            u = beta * u + i - (last * threshold if reset == "subtract" else zero)
        s = step_by_hand(u - threshold - strength * a)
        return (s, i, u, a), (s, u)

    # Written out: inside of `lax.scan`, JAX before 0.12 has the second derivative of the step
    # function itself, which is zero.
    state, outputs = (zero,) * 4, []
    for x in xs:
        state, out = step(state, x)
        outputs.append(out)
    return loss_of(*map(jnp.stack, zip(*outputs, strict=True)))


@pytest.mark.slow
def test_the_gradient_through_the_reset():
    """Where snnTorch has no number: the adaptation, and a reset that is not detached."""
    for name, options in (
        ("RALIFCell", {}),
        ("RALIFCell", {"reset": "zero", "detach_reset": False}),
        ("CuBaLIFCell", {"detach_reset": False}),
    ):
        options = {"name": name, **options}
        grad = lambda f, o=options, n=name: jax.jit(jax.grad(ft.partial(f, **o), (0, 1)))(
            parameters(n), XS
        )
        assert_close(grad(loss), grad(by_hand), tolerance=2e-5)


TRANSFORMS = {
    "eager": lambda f: jax.grad(f, (0, 1)),
    "filter_grad": lambda f: lambda *a: eqx.filter_jit(eqx.filter_grad(lambda a: f(*a)))(a),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f), (0, 1))),
    "jvp": lambda f: jax.jit(lambda *a: jax.jvp(f, a, jax.tree.map(jnp.cos, a))),
    "jvp(grad)": lambda f: jax.jit(
        lambda *a: jax.jvp(jax.grad(f, (0, 1)), a, jax.tree.map(jnp.cos, a))[1]
    ),
    "vmap(grad)": lambda f: jax.jit(
        lambda v, x: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(v, jnp.stack([x, 2 * x]))
    ),
    "grad(vmap)": lambda f: jax.jit(
        jax.grad(lambda v, x: jnp.sum(jax.vmap(f, (None, 0))(v, jnp.stack([x, 2 * x]))))
    ),
}


QUICK = ("jvp(grad)", "grad(vmap)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TRANSFORMS],
)
def test_every_transformation(transform):
    of = lambda f: TRANSFORMS[transform](ft.partial(f, name="RCuBaLIFCell"))
    args = parameters("RCuBaLIFCell"), XS
    assert_close(of(loss)(*args), of(by_hand)(*args), tolerance=1e-4)


@pytest.mark.slow
def test_in_a_scan_in_chunks():
    options = {"name": "RALIFCell", "scan": ft.partial(eqg.filter_scan, checkpoint=3)}
    args = parameters("RALIFCell"), XS
    want = jax.grad(by_hand)(*args, "RALIFCell")
    assert_close(jax.jit(jax.grad(ft.partial(loss, **options)))(*args), want, tolerance=2e-5)


@pytest.mark.thorough
def test_gradients_of_a_layer_over_time():
    args = parameters("RALIFCell"), XS
    want = jax.grad(by_hand)(*args, "RALIFCell")

    def of_layer(values, xs):
        both = lambda state: jnp.concatenate([state.spikes, state.membrane])
        layer = nn.Recurrent(make("RALIFCell", values), output=both)
        return loss_of(*jnp.split(layer(xs)[0], 2, axis=1))

    with checking_leaks():
        assert_close(jax.jit(jax.grad(of_layer))(*args), want, tolerance=2e-5)


@pytest.mark.slow
def test_as_a_layer_over_time(getkey):
    cell = make("RLIFCell", parameters("RLIFCell"))
    layer = nn.Recurrent(cell)
    xs = jnp.stack([XS, XS[::-1]])
    spikes, state = layer(xs, lengths=[STEPS, 5])
    np.testing.assert_array_equal(spikes[0], run(cell, xs[0])[0])
    np.testing.assert_array_equal(spikes[1, :5], run(cell, xs[1, :5])[0])
    assert not spikes[1, 5:].any()
    assert isinstance(state, nn.LIFState)
    # In two parts, as the state is all there is.
    first, half = layer(xs[:, :4])
    second, _ = layer(xs[:, 4:], half)
    np.testing.assert_array_equal(jnp.concatenate([first, second], 1)[0], spikes[0])
    layer = nn.Recurrent(cell, checkpoint=None)
    flow = eqg.gradient_flow(lambda layer: jnp.sum(layer(xs)[0]), layer)
    assert flow["cells[0][0]"].shape == (STEPS,)


# ---------------------------------------------------------------- parameters


def test_a_decay_that_has_walked_out_comes_back():
    """It counts as the nearest bound, and has the gradient of that, also at the bound."""
    total = lambda beta: jnp.sum(run(nn.LIFCell(2, beta, learn_beta=True), XS[:, :2])[1])
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
    assert [b.shape for b in leaves(nn.LIFCell(NEURONS, 0.9, learn_beta=True))] == [()]
    grads = eqx.filter_grad(total)(nn.LIFCell(NEURONS, array, threshold=0.5))
    assert not grads.beta.any()
    # As any constant, it may also be an array of NumPy.
    assert_close(
        run(nn.LIFCell(NEURONS, array), XS), run(nn.LIFCell(NEURONS, beta), XS), tolerance=2e-5
    )
    as_list = nn.LIFCell(NEURONS, beta.tolist())
    assert_close(run(nn.LIFCell(NEURONS, array), XS), run(as_list, XS), tolerance=2e-5)
    # The slope of a surrogate is learned if it is an array.
    cell = nn.LIFCell(NEURONS, 0.9, surrogate=eqg.surrogates.atan(jnp.array(2.0)))
    of_spikes = eqx.filter_grad(lambda cell: jnp.sum(run(cell, XS)[0] * XS))
    assert of_spikes(cell).surrogate.slope != 0


def test_layers_of_any_shape_and_any_surrogate():
    beta = np.linspace(0.1, 0.9, 2, dtype=DTYPE).reshape(2, 1, 1)
    cell = nn.CuBaLIFCell((2, 3, 4), 0.5, beta, surrogate=lambda v: jnp.exp(-jnp.abs(v)))
    x = jnp.ones((2, 3, 4))
    total = lambda x: jnp.sum(cell(x, cell.initial_state()).spikes)
    assert jnp.allclose(jax.grad(total)(x), 1.0)  # at the threshold
    after = cell(x, cell(x, cell.initial_state()))
    assert jnp.allclose(after.membrane[:, 0, 0], 1.5 + beta[:, 0, 0])


@pytest.mark.slow
def test_half_precision():
    """In few binary digits there is nothing to round, so values are the same to the bit."""
    xs = jnp.round(4 * XS[:4]) / 4
    weight = jnp.array([[0.5, -1.0, 0.0], [0.0, 0.5, 1.0], [1.0, 0.0, -0.5]])
    results = []
    for dtype in ("float32", "bfloat16"):
        cell = nn.RALIFCell(
            NEURONS, 0.5, 0.5, strength=0.5, learn_beta=True, dtype=dtype, key=jr.key(0)
        )
        cell = eqx.tree_at(lambda cell: cell.weight_hh, cell, weight.astype(dtype))
        both = lambda cell, dtype=dtype: jnp.stack(run(cell, xs.astype(dtype)))
        values, grads = both(cell), eqx.filter_grad(lambda cell, f=both: jnp.sum(f(cell)))(cell)
        results.append((values, grads.neurons.beta, grads.weight_hh))
        assert all(x.dtype == dtype for x in results[-1])
    single, half = jax.tree.map(lambda x: x.astype("float32"), results)
    assert 0 < jnp.mean(single[0][0]) < 1
    np.testing.assert_array_equal(half[0], single[0])
    assert_close(half[1:], single[1:], tolerance=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["LIFCell", "RCuBaLIFCell"])
def test_a_state_keeps_its_dtypes(name):
    """A bfloat16 cell, float32 inputs: one step is that of float32, rounded at the end."""
    options = {"key": jr.key(0)} if name == "RCuBaLIFCell" else {}
    decays = (0.75, 0.9) if name == "RCuBaLIFCell" else (0.9,)
    cell = getattr(nn, name)(NEURONS, *decays, dtype="bfloat16", **options)
    xs = XS.astype("float32")
    start = cell(1.3 * xs[0], cell.initial_state())
    wide = jax.tree.map(lambda s: s.astype("float32"), start)
    exact = cell(xs[1], wide)
    rounded = jax.tree.map(lambda s: s.astype("bfloat16"), exact)
    assert_close(cell(xs[1], start), rounded, tolerance=0.0)
    assert not jnp.array_equal(rounded.membrane.astype("float32"), exact.membrane)
    emitted, last = nn.Recurrent(cell)(xs)
    np.testing.assert_array_equal(emitted, run(cell, xs)[0])
    assert emitted.dtype == "bfloat16"
    assert 0 < jnp.mean(emitted.astype("float32")) < 1
    assert {s.dtype for s in jax.tree.leaves(last)} == {jnp.dtype("bfloat16")}
    # Each array keeps its own, and inputs in less precision or of integers change nothing.
    mixed = eqx.tree_at(lambda s: s.membrane, start, wide.membrane)
    for x in (xs[0], xs[0].astype("float16"), jnp.ones(NEURONS, "int32")):
        after = cell(x, mixed)
        assert after.spikes.dtype == "bfloat16"
        assert after.membrane.dtype == "float32"


def test_ensembles_and_files(tmp_path, getkey):
    make_cell = lambda beta, key: nn.RLIFCell(NEURONS, beta, learn_beta=True, key=key)
    betas, keys = jnp.array([0.3, 0.9]), jr.split(getkey(), 2)
    cells = eqx.filter_vmap(make_cell)(betas, keys)
    total = lambda cell: jnp.sum(run(cell, XS)[1])
    grads = eqx.filter_jit(eqx.filter_vmap(eqx.filter_grad(total)))(cells)
    one = eqx.filter_jit(eqx.filter_grad(total))(make_cell(betas[1], keys[1]))
    assert_close(grads.weight_hh[1], one.weight_hh, tolerance=2e-5)
    assert_close(grads.neurons.beta[1], one.neurons.beta, tolerance=2e-5)
    eqx.tree_serialise_leaves(tmp_path / "cells", cells)
    like = jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, cells)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "cells", like), cells)


# ---------------------------------------------------------------- cost


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


class TestErrors:
    def test_parameters(self):
        with pytest.raises(RuleError, match=r"`beta` that is not between(?s:.)*is 1\.1"):
            nn.LIFCell(3, 1.1)
        with pytest.raises(RuleError, match="`ALIFCell` was given a `rho` that is not between"):
            nn.RALIFCell(3, 0.9, -0.1, key=jr.key(0))
        with pytest.raises(RuleError, match=r"`threshold` that does not(?s:.)*\(3,\) neurons"):
            nn.LIFCell(3, 0.9, threshold=np.ones(2))
        with pytest.raises(RuleError, match=r"way to reset(?s:.)*`reset` is 'hard'"):
            checks.check_reset("LIFCell", "hard", True)  # the run-time types come before it

    def test_numbers(self):
        for beta in ([2.0, 2.0, 2.0], (0.5, 0.5, 1.5), np.nan, [0.5, np.nan, 0.5]):
            with pytest.raises(RuleError, match="`LIFCell` was given a `beta` that is not be"):
                nn.LIFCell(3, beta)
        for threshold in (np.nan, [1.0, 1.0, np.nan]):
            expected = r"`LIFCell` was given a `threshold` that is not a number(?s:.)*nan"
            with pytest.raises(RuleError, match=expected):
                nn.LIFCell(3, 0.9, threshold=threshold)
        nn.LIFCell(3, 0.9, threshold=np.inf, reset="none")  # it never fires
        unreal = (True, ["a", "b", "c"], [[0.5], 0.5, 0.5], jnp.ones(3, "complex64"))
        for alpha in (*unreal, np.ones(3, bool)):
            expected = (
                r"`CuBaLIFCell` was given a `alpha` that is not of real numbers\.\n  `alp"
            )
            with pytest.raises(RuleError, match=expected):
                nn.CuBaLIFCell(3, alpha, 0.9)

        def of_parts(part):
            return nn.LIFCell(2, [part, part], learn_beta=True).beta

        with pytest.raises(RuleError, match=r"`beta` that is not of real(?s:.)*Give a number"):
            jax.jit(of_parts)(0.5)

        for value in (0.9 + 1j, None, "0.9"):  # the run-time types come before it
            with pytest.raises(RuleError, match=r"`LICell` was given a `beta` that is not of"):
                checks.NeuronParameter("LICell", "beta", value, (3,), "float32")
            with pytest.raises(RuleError, match=r"`threshold` that is not of real(?s:.)*\("):
                checks.NeuronParameter(
                    "LIFCell", "threshold", value or "a", (3,), "float32", learned=True
                )

    @pytest.mark.parametrize("name", ["LIFCell", "LICell", "RALIFCell"])
    def test_dtypes(self, name):
        rho = (0.9,) if name == "RALIFCell" else ()
        options = {"key": jr.key(0)} if name == "RALIFCell" else {}
        inner = name.removeprefix("R")
        for dtype in (int, "int8", bool, "complex64", "no dtype"):
            expected = (
                rf"`{inner}` was given a dtype that is not one of real f(?s:.)*`dtype` is"
            )
            with pytest.raises(RuleError, match=expected):
                getattr(nn, name)(3, 0.9, *rho, learn_beta=True, dtype=dtype, **options)

    def test_sizes(self):
        for size in (0, -1, True, (), (3, 0), (3, True)):
            expected = "`LICell` was given a size that is not a positive(?s:.)*`hidden_size` is"
            with pytest.raises(RuleError, match=expected):
                nn.LICell(size, 0.9)
        for size in (0, True):
            with pytest.raises(RuleError, match="`RLIFCell` was given a size that is not"):
                nn.RLIFCell(size, 0.9, key=jr.key(0))
        for size in ([3, 4], 3.0, (3.0, 4), None):  # the run-time types come before it
            with pytest.raises(RuleError, match=r"`LIFCell` (?s:.)*or the shape of the layer"):
                checks.shape_of_layer("LIFCell", size)
        with pytest.raises(
            RuleError, match=r"`RLIFCell` (?s:.)*is \(3, 4\)\nGive the number of"
        ):
            checks.check_number("RLIFCell", (3, 4))

    def test_surrogates(self):
        for cell in (nn.LIFCell, nn.CuBaLIFCell):
            decays = (0.9,) if cell is nn.LIFCell else (0.9, 0.9)
            expected = f"`{cell.__name__}` was given something that is not a surr(?s:.)*class"
            with pytest.raises(RuleError, match=expected):
                cell(3, *decays, surrogate=eqg.surrogates.atan)
        expected = r"`surrogate` is 'atan'\nGive it one of `eqx_grads\.surrogates`"
        with pytest.raises(RuleError, match=expected):
            checks.known_surrogate("LIFCell", "atan")  # the run-time types come before it

    @pytest.mark.parametrize("name", ["LIFCell", "ALIFCell", "CuBaLIFCell", "LICell"])
    def test_every_array_of_the_state(self, name):
        decays = (0.9, 0.9) if name in ("ALIFCell", "CuBaLIFCell") else (0.9,)
        cell = getattr(nn, name)(3, *decays)
        state = cell.initial_state()
        names = [field.name for field in dataclasses.fields(state)]
        assert len(names) == len(jax.tree.leaves(state))
        for i, leaf in enumerate(names):
            put = lambda x, i=i: eqx.tree_at(lambda s: jax.tree.leaves(s)[i], state, x)
            for wrong in (jnp.zeros((2, 3)), jnp.zeros(()), jnp.zeros(1)):
                expected = rf"`{name}` was given something of another(?s:.)*`state\.{leaf}` is "
                with pytest.raises(RuleError, match=expected):
                    cell(jnp.ones(3), put(wrong))
            for wrong in (jnp.zeros(3, "int32"), jnp.zeros(3, "complex64")):
                expected = rf"`{name}` was given(?s:.)*real n(?s:.)*`state\.{leaf}` is .*\[3\]"
                with pytest.raises(RuleError, match=expected):
                    cell(jnp.ones(3), put(wrong))
            with pytest.raises(RuleError, match=rf"not an array\.\n  `state\.{leaf}` is float"):
                cell(jnp.ones(3), put(0.0))
        # For each example of a batch, that is.
        batch = jax.tree.map(lambda s: jnp.zeros((2, 3)), state)
        assert jax.vmap(cell)(jnp.ones((2, 3)), batch).membrane.shape == (2, 3)

    def test_inputs(self):
        cell = nn.LICell(3, 0.9)
        with pytest.raises(RuleError, match=r"not of real n(?s:.)*`x` is complex64\[3\]"):
            cell(jnp.ones(3, "complex64"), cell.initial_state())
        with pytest.raises(RuleError, match=r"`x` is list \((?s:.)*Use `jnp.asarray`"):
            # The run-time types come before it.
            checks.check_inputs("LICell", 3, [1.0] * 3, cell.initial_state(), nn.LIState)

    def test_shapes_and_states(self):
        cell, wider = nn.LIFCell(3, 0.9), nn.LIFCell(4, 0.9)
        recurrent = nn.RLIFCell(3, 0.9, key=jr.key(0))
        with pytest.raises(RuleError, match=r"`x` is float..\[2,3\], and the .* is \(3,\)"):
            cell(jnp.ones((2, 3)), cell.initial_state())
        with pytest.raises(RuleError, match=r"`RLIFCell` (?s:.)*`state.spikes` is .*\[4\]"):
            recurrent(jnp.ones(3), wider.initial_state())
        with pytest.raises(RuleError, match="`LIFCell` was given something that is not its"):
            checks.check_inputs("LIFCell", 3, jnp.ones(3), jnp.ones(3), nn.LIFState)
