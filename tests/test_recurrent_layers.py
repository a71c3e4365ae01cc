"""Layers over time against their cells in a loop written out, and its autodiff; layers over
linear recurrences also against SciPy, and against what is published of how they begin.

Written out, as XLA 0.10.2 for CPUs gets the gradient of `jax.lax.scan` of `eqx.nn.GRUCell`
wrong in double precision for some odd sizes (its fusion emitters; hidden size 5, batch 4):
https://github.com/jax-ml/jax/issues/39103. With JAX 0.11 as the oldest version, scan.
"""

import functools as ft
from typing import Any

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError
from eqx_grads._jaxprs.structure import equations, holds, inner_programs, Scan, structure
from eqx_grads.nn._linear_recurrent.s5 import hippo_normal

from .helpers import assert_close, quick_only
from .rules.recurrent import loss, losses_of_one_output, reference


LAYERS = {
    "GRU": ft.partial(nn.GRU, 3, 4, keep="gates"),
    "LSTM": ft.partial(nn.LSTM, 3, 4, keep="states"),
    "RNN": ft.partial(nn.RNN, 3, 4),
    "LRU": ft.partial(nn.LRU, 3, 3, 4, r_min=0.4, r_max=0.95),
    "S5": ft.partial(nn.S5, 3, 2, 8, blocks=2, min_step=0.05, max_step=0.5),
    "MinGRU": ft.partial(nn.MinGRU, 3, 4),
    "MinLSTM": ft.partial(nn.MinLSTM, 3, 4),
}
GATED = ("GRU", "LSTM", "RNN")


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_gradient_of_one_output(name, getkey):
    with jax.enable_x64(True):
        layer, xs = LAYERS[name](dtype="float64", key=getkey()), jr.normal(getkey(), (2, 5, 3))
        state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape), layer(xs)[1])
        gradients = lambda run: eqx.filter_jit(
            lambda args: [eqx.filter_grad(loss)(args) for loss in losses_of_one_output(run)]
        )
        args = layer, xs, state
        got = gradients(lambda layer, xs, state: layer(xs, state))(args)
        assert_close(got, gradients(reference)(args), tolerance=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_one_weight_gradient_for_the_batch(name, getkey):
    layer, xs = LAYERS[name](key=getkey()), jr.normal(getkey(), (7, 5, 3))
    total = lambda layer: jnp.sum(jax.vmap(layer)(xs)[0])
    jaxpr = str(jax.make_jaxpr(eqx.filter_grad(total))(layer))
    # Real and imaginary parts are one product.
    shapes = {"LRU": ("8,3", "3,8"), "S5": ("8,3", "2,8"), "MinGRU": ("8,3",)}
    shapes = shapes.get(name, ("12,3",))
    if name in GATED:
        assert f"[7,{layer.cells[0][0].weight_hh.shape[0]}," not in jaxpr
        return
    for shape in shapes:
        assert f"[7,{shape}]" not in jaxpr
        assert f"[{shape}] = dot_general" in jaxpr


@pytest.mark.parametrize("name", quick_only(GATED, ("GRU",), pytest.mark.thorough))
def test_no_example_and_no_step(name, getkey):
    """The witness of the shapes is a batch of one example, and a batch of one inside."""
    layer = LAYERS[name](key=getkey())
    shapes = lambda *sizes: [
        x.shape for x in jax.tree.leaves(jax.vmap(layer)(jnp.zeros((*sizes, 4, 3))))
    ]
    total = lambda args: jnp.sum(jax.vmap(args[0])(args[1])[0])
    for sizes in ((0, 5), (5, 0)):
        assert shapes(*sizes) == [(*sizes, *shape[2:]) for shape in shapes(1, 1)]
        gradients = eqx.filter_grad(total)((layer, jnp.zeros((*sizes, 4, 3))))
        assert not any(jnp.any(g) for g in jax.tree.leaves(gradients))
    xs = jnp.zeros((2, 0, 3))
    state = jax.tree.map(lambda s: s + 0.3, layer(xs)[1])
    ys, end = layer(xs, state)
    assert ys.shape == (2, 0, 4)
    assert_close(end, state, tolerance=1e-10)
    grads = eqx.filter_grad(loss(lambda layer, xs, state: layer(xs, state)))((layer, xs, state))
    assert_close(grads[2], jax.tree.map(lambda s: 2 * s, state), tolerance=1e-6)


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("name", GATED)
def test_what_is_frozen_costs_nothing(name, getkey):
    layer, xs = LAYERS[name](key=getkey()), jnp.ones((8, 50, 3))
    products = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("dot_general")
    total = lambda layer, xs: jnp.sum(layer(xs)[0])
    everything = products(eqx.filter_grad(lambda args: total(*args)), (layer, xs))
    assert products(eqx.filter_grad(total), layer, xs) == everything - 1
    assert products(jax.grad(total, 1), layer, xs) < everything - 1 or name == "LSTM"


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize(("hidden", "in_chunks"), [(4, False), (256, True)])
def test_the_backward_pass_has_chunks_if_the_states_do_not_fit_in_the_cache(
    layer, hidden, in_chunks
):
    params, static = eqx.partition(layer(3, hidden, key=jr.key(0)), eqx.is_inexact_array)
    of_params = lambda params, xs: jnp.sum(eqx.combine(params, static)(xs)[0] ** 2)
    program = jax.make_jaxpr(jax.grad(of_params))(params, jnp.zeros((300, 3)))
    loops = [eqn for eqn in equations(program) if isinstance(structure(eqn), Scan)]
    assert len(loops) == (3 if in_chunks else 2)
    assert any(holds(inner_programs(eqn)[0], Scan) for eqn in loops) == in_chunks


# ---------------------------------------------------------------- cells


class Noisy(eqx.Module):
    """A cell with a random key in its state, whose neurons are a matrix."""

    hidden_size: tuple[int, int] = eqx.field(static=True)

    def __call__(self, x, state):
        h, key = state
        key, subkey = jr.split(key)
        return h / 2 + jnp.sum(x) + jr.normal(subkey, h.shape), key

    def initial_state(self):
        return jnp.zeros(self.hidden_size), jr.key(1)


def test_a_state_with_keys_is_passed_on(getkey):
    # And the shape of the neurons says nothing of the inputs, which are a vector.
    layer, xs = nn.Recurrent(Noisy((2, 2))), jr.normal(getkey(), (3, 4, 5))
    first, state = layer(xs[:, :3])
    second, _ = layer(xs[:, 3:], state)
    assert_close(jnp.concatenate([first, second], 1), layer(xs)[0])


class Image(eqx.Module):
    """A leaky cell of images, with channels first."""

    kernel: jax.Array
    input_size: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, x, h):
        return 0.5 * h + jnp.einsum("oc,chw->ohw", self.kernel, x)

    def initial_state(self):
        return jnp.ones((2, 3, 4), "float32")


def test_states_of_any_shape(getkey):
    kernels = lambda n: jr.normal(getkey(), (2, n), "float32")
    cells = [(Image(kernels(n), (n, 3, 4)), Image(kernels(n), (n, 3, 4))) for n in (1, 4)]
    layer = nn.Recurrent(cells)
    xs = jr.normal(getkey(), (2, 5, 1, 3, 4), "float32")

    def plain(x, length):
        for stage in cells:
            outputs = []
            for cell, reverse in zip(stage, (False, True), strict=True):
                h, ys = cell.initial_state(), [jnp.zeros((2, 3, 4))] * 5
                for t in range(length)[::-1] if reverse else range(length):
                    h = ys[t] = cell(x[t], h)
                outputs.append(jnp.stack(ys))
            x = jnp.concatenate(outputs, 1)
        return x

    ys, last = layer(xs, lengths=[5, 3])
    assert last.shape == (4, 2, 2, 3, 4)
    assert_close(ys, jnp.stack([plain(xs[0], 5), plain(xs[1], 3)]), tolerance=1e-5)
    assert_close(layer(xs[1], lengths=3)[0], ys[1], tolerance=1e-5)
    ends = nn.Outputs(layer, last=True)(xs[0])
    assert_close(ends, jnp.concatenate([ys[0, -1, :2], ys[0, 0, 2:]]), tolerance=1e-6)
    with pytest.raises(RuleError, match=r"`xs` that does not fit(?s:.)*\(time, \*input_size\)"):
        layer(xs[0, 0, 0])


@pytest.mark.parametrize("name", GATED)
def test_the_same_numbers_as_the_cell(name, getkey):
    """With any number for `checkpoint`, the cell is called, in a scan."""
    layer, xs = LAYERS[name](key=getkey()), jr.normal(getkey(), (7, 3))
    cell = layer.cells[0][0]
    called = nn.Recurrent(cell, checkpoint=2)
    assert_close(layer(xs), called(xs), tolerance=2e-6)
    programs = {str(jax.make_jaxpr(l)(xs)) for l in (layer, nn.Recurrent(cell), called)}
    assert len(programs) == 2


class Halving(eqx.nn.GRUCell):
    def __call__(self, x, h):  # pyright: ignore
        return h / 2


def test_a_subclass_of_a_cell_is_called(getkey):
    """It may have another step than the fast path, which is for `GRUCell` only."""
    layer = nn.Recurrent(Halving(3, 4, key=getkey()))
    assert jnp.all(layer(jnp.ones((5, 3)), jnp.ones(4))[0][-1] == 2**-5)


# ---------------------------------------------------------------- how linear recurrences begin


@pytest.mark.parametrize("ring", [{"r_min": 0.999}, {"r_max": 0.1, "max_phase": 0.1}])
def test_no_radius_of_lru_is_one_or_zero(ring, getkey, monkeypatch):
    """At both ends of the ring, which are drawn once in many millions."""

    def ends(key, shape, dtype, low):
        return jnp.array([low, 1 - jnp.finfo(dtype).epsneg], dtype)

    monkeypatch.setattr(jr, "uniform", ends)
    layer = eqx.filter_jit(ft.partial(nn.LRU, 1, 1, 2, **ring, dtype="bfloat16"))(key=getkey())
    ((cell,),) = layer.cells
    assert cell.log_phase.dtype == cell.log_decay.dtype == jnp.float32
    factor, gamma, _ = jax.jit(lambda cell: cell.factors(jnp.float32))(cell)
    assert jnp.all(jnp.real(gamma) > 0)
    radius = np.abs(np.asarray(factor, "complex128"))
    assert 0 < radius.min() < radius.max() < 1
    assert np.exp(-np.exp(np.asarray(cell.log_decay, "float64"))).max() < 1


def test_s5_begins_as_hippo(getkey):
    """The normal part of HiPPO-LegS, as published: entry by entry, with its correction of rank
    one."""
    n = np.arange(32)
    a = -np.tril(np.sqrt(np.outer(2 * n + 1, 2 * n + 1)), -1) - np.diag(n + 1)
    normal = a + np.outer(np.sqrt(n + 0.5), np.sqrt(n + 0.5))
    frequencies, basis = hippo_normal(32)
    # The half that is kept, and its conjugate, are the matrix again.
    half = (basis * (-0.5 + 1j * frequencies)) @ basis.conj().T
    np.testing.assert_allclose(2 * half.real, normal, atol=1e-10)
    layer = eqx.filter_jit(ft.partial(nn.S5, 2, 2, 64, blocks=2))(key=getkey())
    ((cell,),) = layer.cells
    expected = np.tile(np.sort(np.linalg.eigvals(normal).imag)[16:], 2)
    np.testing.assert_allclose(cell.frequency, expected, rtol=1e-5)
    np.testing.assert_allclose(np.exp(cell.log_decay), 0.5, rtol=1e-6)


@pytest.mark.slow
def test_s5_solves_the_differential_equation(getkey):
    """Against SciPy's zero-order hold of the real system with both conjugate halves."""
    from scipy import signal  # which takes seconds to import

    with jax.enable_x64(True):
        layer = nn.S5(2, 3, 8, key=getkey())
        ((cell,),) = layer.cells
        layer = eqx.tree_at(lambda n: n.cells[0][0].log_step, layer, jnp.full(4, np.log(0.1)))
        b, c, turn = cell.weight_in, cell.weight_out, np.diag(cell.frequency)
        a = np.block([[-0.5 * np.eye(4), -turn], [turn, -0.5 * np.eye(4)]])
        out = 2 * np.concatenate([c[0], -c[1]], 1)
        system = a, np.concatenate(b), out, np.asarray(cell.skip)
        discrete: Any = signal.cont2discrete(system, 0.1, "zoh")
        xs = jr.normal(getkey(), (20, 2))
        state, expected = np.zeros(8), []
        for x in np.asarray(xs):
            state = discrete[0] @ state + discrete[1] @ x
            expected.append(discrete[2] @ state + discrete[3] @ x)
        ys, last = layer(xs)
        np.testing.assert_allclose(ys, expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(last.real, state[:4], rtol=1e-10, atol=1e-12)


def test_short_steps_of_s5_keep_their_digits():
    cell = nn.S5(1, 1, 4, min_step=1e-6, max_step=1e-6, key=jr.key(0)).cells[0][0]
    step = np.exp(np.asarray(cell.log_step, "float64"))
    np.testing.assert_allclose(cell.factors("float32")[1], step, rtol=5e-6)


def test_gates_of_minlstm_that_both_underflow(getkey):
    layer = nn.MinLSTM(1, 1, dtype="float32", key=getkey())
    parts = lambda layer: (layer.cells[0][0].bias, layer.cells[0][0].weight)
    gates = jnp.array([-201.0, -200.0, 1.0], "float32"), jnp.zeros((3, 1), "float32")
    layer = eqx.tree_at(parts, layer, gates)
    total = lambda layer: layer(jnp.ones((1, 1), "float32"))[0][0, 0]
    value, grad = eqx.filter_jit(eqx.filter_value_and_grad(total))(layer)
    written = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(value, written, rtol=1e-6)
    slope = written * (1 - written)
    np.testing.assert_allclose(parts(grad)[0], [-slope, slope, written], rtol=1e-5)


# Layers, and one over the variance of their weights.
INITIAL: dict[str, Any] = {
    "RNN": (ft.partial(nn.RNN, 9, 16), dict.fromkeys(("weight_ih", "weight_hh", "bias"), 48)),
    "LSTM": (
        ft.partial(nn.LSTM, 9, 16, proj_size=8),
        dict.fromkeys(("weight_ih", "weight_hh", "weight_hr", "bias"), 48),
    ),
    "MinGRU": (ft.partial(nn.MinGRU, 25, 16), {"weight": 75, "bias": 75}),
    "LIF": (
        ft.partial(nn.LIF, 9, 64, 0.9, recurrent=True),
        {"weight_ih": 27, "weight_hh": 192, "bias": 27},
    ),
    "LRU": (
        ft.partial(nn.LRU, 2, 40, 999, r_min=0.5, r_max=0.9, max_phase=3.0),
        {"weight_in": 4, "weight_out": 999, "skip": 2},
    ),
    "S5": (ft.partial(nn.S5, 3, 40, 98), {"weight_in": 6, "weight_out": 196, "skip": 3}),
    "GatedDeltaNet": (
        ft.partial(nn.GatedDeltaNet, 9, 5, heads=99, key_size=1, conv_size=3),
        {"weight_in": 9, "weight_out": 99, "convolution": 9},
    ),
    "SelectiveSSM": (
        ft.partial(nn.SelectiveSSM, 33, 5, channels=99, state_size=2),
        {"weight_in": 33, "weight_select": 99, "weight_step": 3, "weight_out": 99},
    ),
}


def test_initial_values():
    """As the papers and PyTorch say: normal, or uniform between bounds; each by its own key."""

    def begin(name, outputs, **options):
        layer = INITIAL[name][0](**options)
        cell = layer.cells[0][0]
        for dtype, expected in outputs.items():
            shapes = ((n, cell.input_size) for n in (0, 2))
            none, two = (jax.eval_shape(layer, jnp.zeros(shape, dtype)) for shape in shapes)
            assert none[0].dtype == two[0].dtype == expected
            assert none[1] == two[1]
        return vars(cell)

    of_all = lambda *args, **options: (
        lambda key: {name: begin(name, *args, key=key, **options) for name in INITIAL}
    )
    single = of_all({"float16": "float32"})
    of = jax.tree.map(np.asarray, eqx.filter_jit(single)(jr.key(0)))
    half = of_all({"float16": "float16", "float32": "float32"}, dtype="float16")
    for name, cell in eqx.filter_eval_shape(half, jr.key(0)).items():
        for leaf, x in cell.items():
            is_half = name not in ("LRU", "S5") or leaf in INITIAL[name][1]
            expected = "float16" if is_half else "float32"
            assert getattr(x, "dtype", expected) == expected, (name, leaf)
    for name, (_, sizes) in INITIAL.items():
        weights = [np.ravel(of[name][leaf]) * size**0.5 for leaf, size in sizes.items()]
        assert all(abs(np.mean(x)) < 0.2 and 0.75 < np.mean(x**2) < 1.25 for x in weights), name
        assert len({x[1] / x[0] for x in weights}) == len(weights)
    lru, net = of["LRU"], of["GatedDeltaNet"]
    squared = np.exp(-2 * np.exp(lru["log_decay"]))
    steps = [np.log(np.log1p(np.exp(of[name]["bias_step"]))) for name in list(INITIAL)[-2:]]
    for x, low, high in (
        (squared, 0.25, 0.81), (np.exp(lru["log_phase"]), 0, 3),
        (np.exp(net["log_rate"]), 1, 16),
        *((step, np.log(0.001), np.log(0.1)) for step in (of["S5"]["log_step"], *steps)),
        (of["RNN"]["weight_hh"], -0.25, 0.25), (of["MinGRU"]["weight"], -0.2, 0.2),
    ):  # fmt: skip
        rank = np.linspace(0, 1, x.size)
        error = np.max(np.abs((np.sort(x.ravel()) - low) / (high - low) - rank))
        assert error < 1.6 / x.size**0.5
    np.testing.assert_allclose(np.exp(2 * lru["log_gamma"]), 1 - squared, rtol=2e-6)
