"""Recurrent layers against their cells in a loop written out, and its autodiff.

Written out, as XLA 0.10.2 for CPUs gets the gradient of `jax.lax.scan` of `eqx.nn.GRUCell`
wrong in double precision for some odd sizes (its fusion emitters; hidden size 5, batch 4):
https://github.com/jax-ml/jax/issues/39103. With JAX 0.11 as the oldest version, scan.
"""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError
from eqx_grads._jaxprs.structure import equations, holds, inner_programs, Scan, structure

from .helpers import assert_close
from .rules.recurrent import loss, losses_of_one_output, reference


LAYERS = {
    "GRU, gates": ft.partial(nn.GRU, keep="gates"),
    "GRU, states": ft.partial(nn.GRU, keep="states"),
    "LSTM, gates": ft.partial(nn.LSTM, keep="gates"),
    "LSTM, states": ft.partial(nn.LSTM, keep="states"),
    "RNN, tanh": ft.partial(nn.RNN, activation="tanh"),
    "RNN, relu": ft.partial(nn.RNN, activation="relu"),
}
ONE_OF_EACH = ("GRU, gates", "LSTM, states", "RNN, tanh")


def make(getkey, name, *, dtype="float64", steps=5, batch=2, **options):
    layer = LAYERS[name](3, 4, dtype=dtype, key=getkey(), **options)
    xs = jr.normal(getkey(), (batch, steps, 3), dtype)
    _, state = layer(xs)
    state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape, dtype), state)
    return layer, xs, state


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradient_of_one_output(name, getkey):
    with jax.enable_x64(True):
        args = make(getkey, name)
        gradients = lambda run: eqx.filter_jit(
            lambda args: [eqx.filter_grad(loss)(args) for loss in losses_of_one_output(run)]
        )
        got = gradients(lambda layer, xs, state: layer(xs, state))(args)
        assert_close(got, gradients(reference)(args), tolerance=1e-10)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_weight_gradient_for_the_batch(name, getkey):
    layer, xs, _ = make(getkey, name, dtype="float32", batch=7)
    total = lambda layer: jnp.sum(jax.vmap(layer)(xs)[0])
    jaxpr = str(jax.make_jaxpr(eqx.filter_grad(total))(layer))
    assert f"[7,{layer.cells[0][0].weight_hh.shape[0]}," not in jaxpr


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("sizes", [(0, 5), (0, 1), (5, 0), (0, 0)])
def test_vmap_of_no_examples(name, sizes, getkey):
    """The witness of the shapes is a batch of one example, and a batch of one inside."""
    layer, _, _ = make(getkey, name, dtype="float32")
    shapes = lambda *sizes: jax.tree.map(jnp.shape, jax.vmap(layer)(jnp.zeros((*sizes, 4, 3))))
    of_some = jax.tree.map(lambda s: (*sizes, *s[2:]), shapes(1, 1), is_leaf=_is_shape)
    assert shapes(*sizes) == of_some
    total = lambda layer, xs: jnp.sum(jax.vmap(layer)(xs)[0])
    gradients = eqx.filter_grad(lambda args: total(*args))((layer, jnp.zeros((*sizes, 4, 3))))
    assert not any(jnp.any(g) for g in jax.tree.leaves(gradients))


def _is_shape(x):
    return isinstance(x, tuple) and isinstance(x[0], int)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_frozen_costs_nothing(name, getkey):
    layer, xs, _ = make(getkey, name, dtype="float32", steps=50, batch=8)
    products = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("dot_general")
    total = lambda layer, xs: jnp.sum(layer(xs)[0])
    everything = products(eqx.filter_grad(lambda args: total(*args)), (layer, xs))
    for_weights = products(eqx.filter_grad(total), layer, xs)
    for_inputs = products(jax.grad(total, 1), layer, xs)
    assert for_weights == everything - 1
    assert for_inputs < everything - 1 or "LSTM" in name


def temp_bytes(run, *args):
    total = lambda args: jnp.sum(jnp.sin(run(*args)))
    compiled = jax.jit(jax.grad(total)).lower(args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.cost
@pytest.mark.parametrize("name", ["GRU, gates", "GRU, states", "LSTM, gates"])
def test_memory_at_any_number_of_steps(name, getkey):
    """146 = 2 * 73, 201 = 3 * 67, and 193 is a prime, and one more than 12 * 16."""
    checkpoint = {"gates": None, "states": "replay"}[LAYERS[name].keywords["keep"]]
    cell = LAYERS[name](32, 96, key=getkey()).cells[0][0]
    last = lambda cell, xs: jax.tree.leaves(nn.Recurrent(cell, checkpoint=checkpoint)(xs)[1])[0]
    bytes_of_a_step = {
        steps: temp_bytes(last, cell, jnp.ones((32, steps, 32))) / steps
        for steps in (144, 146, 192, 193, 201)
    }
    for steps, good in {146: 144, 193: 192, 201: 192}.items():
        assert bytes_of_a_step[steps] < 1.15 * bytes_of_a_step[good], steps


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("steps", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_step_and_one_step(name, steps, getkey):
    layer, xs, state = make(getkey, name, dtype="float32", steps=steps)
    ys, end = layer(xs, state)
    assert ys.shape == (2, steps, 4)
    if steps == 0:
        assert_close(end, state, tolerance=1e-10)
    else:
        assert_close(end, jax.vmap(layer.cells[0][0])(xs[:, 0], state), tolerance=1e-6)
    grads = eqx.filter_grad(loss(lambda layer, xs, state: layer(xs, state)))((layer, xs, state))
    assert all(jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads))
    if steps == 0:
        assert_close(grads[2], jax.tree.map(lambda s: 2 * s, state), tolerance=1e-6)


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
    ys, _ = layer(xs)
    first, state = layer(xs[:, :3])
    second, _ = layer(xs[:, 3:], state)
    assert_close(jnp.concatenate([first, second], 1), ys)
    with pytest.raises(RuleError, match=r"state\[0\] is key"):
        layer(xs, (jr.split(getkey(), 3), state[1]))


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
    with pytest.raises(RuleError, match=r"`xs` with 2 axes(?s:.)*\(time, \*input_size\)"):
        layer(xs[0, 0, 0])


@pytest.mark.parametrize("make_layer", [nn.GRU, nn.LSTM, nn.RNN])
def test_the_same_numbers_as_the_cell(make_layer, getkey):
    """With any number for `checkpoint`, the cell is called, in a scan."""
    layer, xs = make_layer(3, 4, key=getkey()), jr.normal(getkey(), (7, 3))
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


# ---------------------------------------------------------------- the norm of each step


class Network(eqx.Module):
    rnn: nn.GRU | nn.LSTM | nn.RNN
    readout: eqx.nn.Linear

    def __call__(self, xs):
        ys, _ = self.rnn(xs)
        return self.readout(ys[-1])


def norms_of_states(cell, readout, xs):
    """The gradient of the loss with respect to each state, by differentiating a plain loop with
    respect to something that is added to the states."""
    zero = jnp.zeros(4)
    state = (zero, zero) if isinstance(cell, eqx.nn.LSTMCell) else zero
    added = [jax.tree.map(jnp.zeros_like, state) for _ in xs]

    def loss(added):
        h = state
        for x, extra in zip(xs, added, strict=True):
            h = jax.tree.map(jnp.add, cell(x, h), extra)
        return jnp.sum(readout(jax.tree.leaves(h)[0]) ** 2)

    grads = jax.grad(loss)(added)
    return [np.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grad))) for grad in grads]


def loss_of(network, xs):
    return jnp.sum(network(xs) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_gradient_flow_of_recurrent_layers(name, getkey):
    network = Network(getattr(nn, name)(3, 4, key=getkey()), eqx.nn.Linear(4, 2, key=getkey()))
    xs = jr.normal(getkey(), (6, 3))
    want = norms_of_states(network.rnn.cells[0][0], network.readout, xs)
    flow = eqg.gradient_flow(loss_of, network, xs)
    assert list(flow) == ["rnn", "readout"]
    assert flow["readout"].shape == (1,)
    np.testing.assert_allclose(flow["rnn"], want, rtol=1e-5)
    (chosen,) = eqg.gradient_flow(loss_of, network, xs, where=lambda m: m.rnn).items()
    assert chosen[0] == "rnn"
    np.testing.assert_array_equal(chosen[1], flow["rnn"])


# ---------------------------------------------------------------- in other layers


@pytest.mark.parametrize("reverse", [False, True])
def test_recurrent_layers_in_sequential(reverse, getkey):
    layer = nn.GRU(3, 4, bidirectional=True, reverse=reverse, key=getkey())
    linear = eqx.nn.Linear(8, 2, key=getkey())
    xs = jr.normal(getkey(), (6, 3))
    model = eqx.nn.Sequential([nn.Outputs(layer, last=True), linear])
    ys, _ = layer(xs)
    first, second = (0, -1) if reverse else (-1, 0)
    last = jnp.concatenate([ys[first, :4], ys[second, 4:]])
    np.testing.assert_allclose(model(xs), linear(last), rtol=1e-6)
    np.testing.assert_array_equal(nn.Outputs(layer)(xs), ys)
    batch = jnp.stack([xs, 2 * xs])
    one_by_one = jnp.stack([model[0](x) for x in batch])
    np.testing.assert_allclose(model[0](batch), one_by_one, rtol=1e-5, atol=1e-6)
    grads = eqx.filter_grad(lambda model: jnp.sum(model(xs)))(model)
    assert any(jnp.any(g != 0) for g in jax.tree.leaves(grads[0]))


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
