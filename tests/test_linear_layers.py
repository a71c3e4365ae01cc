"""Layers over linear recurrences: SciPy's zero-order hold, and what is published of how they
begin."""

import functools as ft
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
from eqx_grads.nn._linear_recurrent.s5 import hippo_normal


LAYERS = {
    "LRU": ft.partial(nn.LRU, 3, 3, 4, r_min=0.4, r_max=0.95),
    "S5": ft.partial(
        nn.S5, 3, 2, 8, blocks=2, min_step=0.05, max_step=0.5, activation=jnp.tanh
    ),
    "MinGRU": ft.partial(nn.MinGRU, 3, 4),
    "MinLSTM": ft.partial(nn.MinLSTM, 3, 4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_weight_gradient_for_the_batch(name, getkey):
    options = {"activation": None} if name == "S5" else {}
    layer = LAYERS[name](dtype="float32", key=getkey(), **options)
    xs = jr.normal(getkey(), (7, 5, 3), "float32")
    total = lambda layer: jnp.sum(jax.vmap(layer)(xs)[0])
    jaxpr = str(jax.make_jaxpr(eqx.filter_grad(total))(layer))
    # Real and imaginary parts are one product.
    shapes = {"LRU": ("8,3", "3,8"), "S5": ("8,3", "2,8"), "MinGRU": ("8,3",)}
    for shape in shapes.get(name, ("12,3",)):
        assert f"[7,{shape}]" not in jaxpr
        assert f"[{shape}] = dot_general" in jaxpr


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
