"""Layers over linear recurrences against their equations, step by step, and autodiff of these.

Also against SciPy's zero-order hold, and against what is published of how they begin.
"""

import functools as ft
import io
from typing import Any

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.signal
import scipy.stats
from eqx_grads import RuleError
from eqx_grads.nn._linear_recurrent.s5 import hippo_normal

from .helpers import assert_close, checking_leaks
from .rules.recurrent import loss, reference


LAYERS = {
    "LRU": ft.partial(nn.LRU, 3, 3, 4, r_min=0.4, r_max=0.95),
    "S5": ft.partial(
        nn.S5, 3, 2, 8, blocks=2, min_step=0.05, max_step=0.5, activation=jnp.tanh
    ),
    "MinGRU": ft.partial(nn.MinGRU, 3, 4),
    "MinLSTM": ft.partial(nn.MinLSTM, 3, 4),
}
slow = pytest.mark.slow


def quick(*names):
    """All layers, of which others are slow."""
    return [name if name in names else pytest.param(name, marks=slow) for name in LAYERS]


def lru_step(cell, x, h):
    factor = jnp.exp(jax.lax.complex(-jnp.exp(cell.log_decay), jnp.exp(cell.log_phase)))
    drive = jax.lax.complex(*(cell.weight_in @ x)) * jax.lax.complex(
        jnp.exp(cell.log_gamma), 0.0
    )
    h = factor * h + drive
    return outputs(cell, x, h), h


def s5_step(cell, x, h):
    rate = jax.lax.complex(-jnp.exp(cell.log_decay), cell.frequency)
    factor = jnp.exp(rate * jax.lax.complex(jnp.exp(cell.log_step), 0.0))
    h = factor * h + (factor - 1) / rate * jax.lax.complex(*(cell.weight_in @ x))
    y = 2 * outputs(cell, x, h) - outputs(cell, x, 0 * h)
    return jnp.tanh(y), h


def outputs(cell, x, h):
    weight = jax.lax.complex(*cell.weight_out)
    direct = cell.skip * x if cell.skip.ndim == 1 else cell.skip @ x
    return jnp.real(weight @ h) + direct


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def min_gru_step(cell, x, h):
    update, candidate = jnp.split(cell.weight @ x + cell.bias, 2)
    h = (1 - sigmoid(update)) * h + sigmoid(update) * candidate
    return h, h


def min_lstm_step(cell, x, h):
    forget, write, candidate = jnp.split(cell.weight @ x + cell.bias, 3)
    forget, write = sigmoid(forget), sigmoid(write)
    h = (forget * h + write * candidate) / (forget + write)
    return h, h


STEPS = {"LRU": lru_step, "S5": s5_step, "MinGRU": min_gru_step, "MinLSTM": min_lstm_step}


def written_out(name):
    """All examples, each in a plain scan of one step."""

    def run(cell, xs, state, reverse):
        def step(h, x):
            y, h = STEPS[name](cell, x, h)
            return h, y

        last, ys = jax.lax.scan(step, state, xs, reverse=reverse)
        return ys, last

    return ft.partial(reference, run=run)


def make(getkey, name, *, dtype="float64", steps=4, batch=2, **options):
    layer = LAYERS[name](dtype=dtype, key=getkey(), **options)
    xs = jr.normal(getkey(), (batch, steps, 3), dtype)
    _, state = eqx.filter_eval_shape(lambda: layer(xs, inference=True))
    return layer, xs, jr.normal(getkey(), state.shape, state.dtype)


def call(layer, xs, state):
    return layer(xs, state)


def all_of(run):
    """Outputs, last state, and the gradient for all parameters, inputs and first states."""

    @eqx.filter_jit
    def value_and_gradient(*args):
        return run(*args), eqx.filter_grad(loss(run))(args)

    return value_and_gradient


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_stacked_bidirectional_and_padded(name, getkey):
    with jax.enable_x64(True):
        args = make(getkey, name, num_layers=2, bidirectional=True, steps=5)
        run = lambda layer, xs, state: layer(xs, state, lengths=[5, 2])
        plain = ft.partial(written_out(name), lengths=[5, 2])
        assert_close(all_of(run)(*args), all_of(plain)(*args), tolerance=1e-10)


@pytest.mark.parametrize("name", quick("MinGRU"))
def test_one_weight_gradient_for_the_batch(name, getkey):
    options = {"activation": None} if name == "S5" else {}
    layer, xs, _ = make(getkey, name, dtype="float32", batch=7, steps=5, **options)
    total = lambda layer: jnp.sum(jax.vmap(layer)(xs)[0])
    jaxpr = str(jax.make_jaxpr(eqx.filter_grad(total))(layer))
    # Real and imaginary parts are one product.
    shapes = {"LRU": ("8,3", "3,8"), "S5": ("8,3", "2,8"), "MinGRU": ("8,3",)}
    for shape in shapes.get(name, ("12,3",)):
        assert f"[7,{shape}]" not in jaxpr
        assert f"[{shape}] = dot_general" in jaxpr


@pytest.mark.parametrize("name", quick("LRU"))
def test_no_step(name, getkey):
    args = make(getkey, name, dtype="float32", steps=0, bidirectional=True)
    (ys, end), grads = all_of(call)(*args)
    assert ys.shape[:2] == (2, 0)
    assert_close(end, args[2], tolerance=1e-10)
    assert_close(grads[2], jnp.conj(2 * args[2]), tolerance=1e-6)
    assert not any(jnp.any(g) for g in jax.tree.leaves(grads[:2]))


@pytest.mark.parametrize("name", quick("MinGRU"))
def test_one_step_at_a_time(name, getkey):
    layer, xs, _ = make(getkey, name, dtype="float32")
    one_step = eqx.filter_jit(layer)
    state, outputs = None, []
    for t in range(xs.shape[1]):
        y, state = one_step(xs[:, t : t + 1], state)
        outputs.append(y)
    assert_close(
        (jnp.concatenate(outputs, 1), state), eqx.filter_jit(layer)(xs), tolerance=2e-6
    )


@pytest.mark.parametrize("name", quick("MinGRU"))
def test_methods_and_layouts(name, getkey):
    _, xs, state = make(getkey, name, dtype="float32")
    key = getkey()
    one = LAYERS[name](dtype="float32", key=key)
    other = LAYERS[name](dtype="float32", key=key, method="associative", time_major=True)

    @jax.jit
    def all_ways(xs, state):
        ys, end = other(jnp.swapaxes(xs, 0, 1), state)
        example, last = one(xs[0], state[0])
        return (jnp.swapaxes(ys, 0, 1), end), (example[None], last[None])

    expected = one(xs, state)
    turned, alone = all_ways(xs, state)
    assert_close(turned, expected, tolerance=2e-6)
    assert_close(alone, jax.tree.map(lambda y: y[:1], expected), tolerance=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(name, getkey):
    """Only parameters, inputs and outputs are rounded to it."""
    options = {"activation": None} if name == "S5" else {}
    args = make(getkey, name, dtype="bfloat16", steps=300, batch=4, **options)
    layer, xs, state = args
    assert state.dtype == ("complex64" if name in ("LRU", "S5") else "float32")
    cast = lambda tree: jax.tree.map(
        lambda w: w.astype("float32") if eqx.is_inexact_array(w) else w, tree
    )
    single = (cast(layer), cast(xs), state)

    # Sums of 1200 terms: in half precision they would stop at 256 times one of them.
    @eqx.filter_jit
    def both(args):
        total = lambda args: jnp.sum(call(*args)[0].astype("float32"))
        return call(*args), eqx.filter_grad(total)(args)

    (ys, end), grads = both(args)
    (expected, expected_end), expected_grads = both(single)
    assert_close(end, expected_end, tolerance=2e-6)
    assert ys.dtype == "bfloat16"
    assert_close(ys.astype("float32"), expected, tolerance=2**-8)
    given = jax.tree.leaves(eqx.filter(args, eqx.is_inexact_array))
    for g, w, x in zip(*map(jax.tree.leaves, (grads, expected_grads, given)), strict=True):
        assert g.dtype == x.dtype  # bfloat16, or that of the state or of a phase
        # Of the inputs, it is a sum of three that are rounded each.
        assert jnp.max(jnp.abs(g.astype(w.dtype) - w)) <= 2**-7 * jnp.max(jnp.abs(w))
    # Inputs in single precision: so are the outputs.
    assert eqx.filter_eval_shape(layer, cast(xs))[0].dtype == "float32"


@pytest.mark.parametrize("name", quick("LRU"))
def test_learned_initial_state(name, getkey):
    layer, xs, _ = make(
        getkey, name, dtype="float32", learn_initial_state=True, num_layers=2, dropout=0.5
    )
    is_complex = name in ("LRU", "S5")
    where = lambda layer: layer.initial_parts if is_complex else layer.initial_state

    @eqx.filter_jit
    def total(parts):
        moved = eqx.tree_at(where, layer, parts)
        return jnp.sum(moved(xs, inference=True)[0] ** 2)

    grad = jax.grad(total)(where(layer))
    assert grad.dtype == "float32"
    assert grad.shape == ((2, 2, 4) if is_complex else (2, 4))
    # Downhill is against the gradient, also in the imaginary part.
    slope = (total(1e-2 * grad) - total(-1e-2 * grad)) / 2e-2
    np.testing.assert_allclose(slope, jnp.sum(grad**2), rtol=1e-3)
    with pytest.raises(RuleError, match=f"A call of `{name}` with dropout was given no"):
        layer(xs)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_ensembles_and_files(name, getkey):
    keys = jr.split(getkey())
    make_one = lambda key: LAYERS[name](key=key)
    ensemble = eqx.filter_jit(eqx.filter_vmap(make_one))(keys)
    xs = jr.normal(getkey(), (2, 3))
    ys, _ = eqx.filter_jit(eqx.filter_vmap(lambda layer: layer(xs)))(ensemble)
    layer = make_one(keys[1])
    assert_close(ys[1], layer(xs)[0], tolerance=1e-5)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, make_one(keys[0])), layer)
    with checking_leaks():
        eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(layer(xs, lengths=1)[0])))(layer)


# ------------------------------------------------------------------ how they begin


@pytest.mark.slow
def test_lru_begins_in_a_ring(getkey):
    layer = nn.LRU(1, 1, 4000, r_min=0.5, r_max=0.9, max_phase=0.3, key=getkey())
    ((cell,),) = layer.cells
    radius, phase = np.exp(-np.exp(cell.log_decay)), np.exp(cell.log_phase)
    # Uniform in the area: so are the square of the radius, and the phase.
    for sample, low, high in ((radius**2, 0.25, 0.81), (phase, 0.0, 0.3)):
        assert low <= sample.min() <= sample.max() <= high
        assert scipy.stats.kstest(sample, "uniform", (low, high - low)).pvalue > 1e-3
    # White noise of unit variance is put out with unit variance, whatever the radius.
    drive = np.exp(cell.log_gamma) * np.asarray(jr.normal(getkey(), (200, 4000)))
    factor = radius * np.exp(1j * phase)
    state, power = 0, 0
    for t, b in enumerate(drive):
        state = factor * state + b
        power = power + np.mean(np.abs(state) ** 2) * (t >= 100) / 100
    np.testing.assert_allclose(power, 1.0, rtol=0.02)
    # Also at the edges, in half precision: no state is lost, and nothing is infinite.
    layer = nn.LRU(1, 1, 4000, dtype="bfloat16", key=getkey())
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(layer.cells))


@pytest.mark.parametrize("ring", [{"r_min": 0.999}, {"r_max": 0.1, "max_phase": 0.1}])
def test_no_radius_of_lru_is_one_or_zero(ring, getkey, monkeypatch):
    """At both ends of the ring, which are drawn once in many millions."""

    def ends(key, shape, dtype, low):
        return jnp.array([low, 1 - jnp.finfo(dtype).epsneg], dtype)

    monkeypatch.setattr(jr, "uniform", ends)
    ((cell,),) = nn.LRU(1, 1, 2, **ring, dtype="float32", key=getkey()).cells
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(cell))
    factor, gamma, _ = cell.factors(jnp.float32)
    assert jnp.all(jnp.real(gamma) > 0)
    radius = np.abs(np.asarray(factor, "complex128"))
    assert 0 < radius.min() < radius.max() < 1
    assert np.exp(-np.exp(np.asarray(cell.log_decay, "float64"))).max() < 1


def legs(size):
    """HiPPO-LegS and its rank-one correction, as published, entry by entry."""
    a, p = np.zeros((size, size)), np.zeros(size)
    for n in range(size):
        p[n] = (n + 0.5) ** 0.5
        for k in range(n):
            a[n, k] = -((2 * n + 1) ** 0.5) * (2 * k + 1) ** 0.5
        a[n, n] = -(n + 1)
    return a, p


@pytest.mark.slow
def test_s5_begins_as_hippo(getkey):
    a, p = legs(32)
    normal = a + np.outer(p, p)
    np.testing.assert_allclose(normal @ normal.T, normal.T @ normal, atol=1e-10)
    frequencies, basis = hippo_normal(32)
    # The half that is kept, and its conjugate, are the matrix again.
    half = (basis * (-0.5 + 1j * frequencies)) @ basis.conj().T
    np.testing.assert_allclose(2 * half.real, normal, atol=1e-10)
    published = np.linalg.eigvals(normal)
    np.testing.assert_allclose(published.real, -0.5, atol=1e-10)
    layer = nn.S5(2, 2, 64, blocks=2, min_step=0.01, max_step=0.2, key=getkey())
    ((cell,),) = layer.cells
    expected = np.tile(np.sort(published.imag)[16:], 2)
    np.testing.assert_allclose(cell.frequency, expected, rtol=1e-5)
    np.testing.assert_allclose(np.exp(cell.log_decay), 0.5, rtol=1e-6)
    # The fastest turns at some N² / pi (S4D, section 4.2).
    np.testing.assert_allclose(hippo_normal(256)[0][-1], 256**2 / np.pi, rtol=0.01)
    steps = nn.S5(1, 1, 400, blocks=100, min_step=0.01, max_step=0.2, key=getkey())
    log_step = np.asarray(steps.cells[0][0].log_step)
    assert np.log(0.01) <= log_step.min() <= log_step.max() <= np.log(0.2) + 1e-6
    uniform = scipy.stats.kstest(log_step, "uniform", (np.log(0.01), np.log(20)))
    assert uniform.pvalue > 1e-3


@pytest.mark.slow
def test_s5_solves_the_differential_equation(getkey):
    """Against SciPy's zero-order hold of the real system with both conjugate halves."""
    with jax.enable_x64(True):
        layer = nn.S5(2, 3, 8, key=getkey())
        ((cell,),) = layer.cells
        layer = eqx.tree_at(lambda n: n.cells[0][0].log_step, layer, jnp.full(4, np.log(0.1)))
        b, c = cell.weight_in, cell.weight_out
        turn = np.diag(cell.frequency)
        a = np.block([[-0.5 * np.eye(4), -turn], [turn, -0.5 * np.eye(4)]])
        system = (
            a,
            np.concatenate(b),
            2 * np.concatenate([c[0], -c[1]], 1),
            np.asarray(cell.skip),
        )
        discrete: Any = scipy.signal.cont2discrete(system, 0.1, "zoh")
        xs = jr.normal(getkey(), (20, 2))
        state, expected = np.zeros(8), []
        for x in np.asarray(xs):
            state = discrete[0] @ state + discrete[1] @ x
            expected.append(discrete[2] @ state + discrete[3] @ x)
        ys, last = layer(xs)
        np.testing.assert_allclose(ys, expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(last.real, state[:4], rtol=1e-10, atol=1e-12)


def test_short_steps_lose_no_digits(getkey):
    layer = nn.S5(1, 1, 4, min_step=1e-6, max_step=1e-6, dtype="float32", key=getkey())
    ((cell,),) = layer.cells
    _, scale, _ = cell.factors("float32")
    step = np.exp(np.asarray(cell.log_step, "float64"))
    np.testing.assert_allclose(scale, step, rtol=5e-6)


def test_gates_too_small_for_a_float(getkey):
    layer = nn.MinLSTM(1, 1, dtype="float32", key=getkey())
    gates = lambda layer: layer.cells[0][0].bias
    layer = eqx.tree_at(gates, layer, jnp.array([-201.0, -200.0, 1.0], "float32"))
    zero = eqx.tree_at(lambda n: n.cells[0][0].weight, layer, jnp.zeros((3, 1), "float32"))
    total = lambda layer: layer(jnp.ones((1, 1), "float32"))[0][0, 0]
    value, grad = eqx.filter_jit(eqx.filter_value_and_grad(total))(zero)
    written = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(value, written, rtol=1e-6)
    grad = gates(grad)
    slope = written * (1 - written)
    np.testing.assert_allclose(grad, [-slope, slope, written], rtol=1e-5)


class TestErrors:
    @pytest.mark.parametrize("name", LAYERS)
    def test_inputs(self, name, getkey):
        layer, xs, state = make(getkey, name, dtype="float32")
        for bad in (jnp.ones((5, 2), "float32"), jnp.ones((0, 2), "float32")):
            expected = rf"`{name}` was given inputs of the wrong size(?s:.)*32\[2\].*is 3"
            with pytest.raises(RuleError, match=expected):
                layer(bad)
        with pytest.raises(RuleError, match="from 2 to 6"):
            layer(xs, lengths=[2, 6])
        with pytest.raises(RuleError, match=rf"`{name}` was given `xs` with 4 axes"):
            layer(xs[None])
        with pytest.raises(RuleError, match=rf"`{name}` was given a `state` that does not fit"):
            layer(xs, state[:, :2])
        with pytest.raises(RuleError, match=rf"`{name}` was given complex numbers(?s:.)*`xs`"):
            layer(xs.astype("complex64"))

    @pytest.mark.parametrize("name", ["MinGRU", "MinLSTM"])
    def test_complex_states(self, name, getkey):
        layer, xs, state = make(getkey, name, dtype="float32")
        expected = rf"`{name}` was given complex numbers(?s:.)*`state` is complex64\[2,4\]"
        with pytest.raises(RuleError, match=expected):
            layer(xs, state.astype("complex64"))

    def test_method(self, getkey):
        with pytest.raises(RuleError, match="`method` is 'fast'"):
            nn.MinGRU(3, 4, method="fast", key=getkey())

    def test_how_they_begin(self, getkey):
        with pytest.raises(RuleError, match="`state_size` is 0"):
            nn.LRU(3, 4, 0, key=getkey())
        with pytest.raises(RuleError, match="`input_size` is 0"):
            nn.MinGRU(0, 4, key=getkey())
        with pytest.raises(
            RuleError, match=r"`LRU` needs `0 <= r_min(?s:.)*  `r_min` is 0.9, `r_max` is"
        ):
            nn.LRU(3, 4, 4, r_min=0.9, r_max=0.5, key=getkey())
        with pytest.raises(RuleError, match=r"`max_phase` is -1(?s:.)*a positive phase"):
            nn.LRU(3, 4, 4, max_phase=-1.0, key=getkey())
        with pytest.raises(RuleError, match=r"`state_size` is 6, `blocks` is 2\nChoose"):
            nn.S5(3, 4, 6, blocks=2, key=getkey())
        with pytest.raises(RuleError, match=r"`min_step` is 0\.1, `max_step` is 0\.01"):
            nn.S5(3, 4, 6, min_step=0.1, max_step=0.01, key=getkey())
