"""`gradient_flow`: the gradient of each activation, against gradients with respect to what is
added there; and its plot."""

import sys

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib as mpl
import numpy as np
import pytest
from eqx_grads import RuleError
from matplotlib.figure import Figure

from .helpers import assert_close


XS = jr.normal(jr.key(1), (4, 2))


class Stack(eqx.Module):
    """Two recurrent layers, and a readout of the last step."""

    cells: list[eqx.nn.GRUCell]
    readout: eqx.nn.Linear
    scale: float = 1.0

    def __call__(self, xs, eps=None):
        """With something added to each activation."""
        added = lambda x, eps: x if eps is None else x + eps

        def body(hs, x_and_eps):
            x, eps = x_and_eps
            h0 = added(self.cells[0](x, hs[0]), eps and eps[0])
            h1 = added(self.cells[1](h0, hs[1]), eps and eps[1])
            return [h0, h1], None

        hs, _ = jax.lax.scan(body, [jnp.zeros(4), jnp.zeros(3)], (xs, eps and eps[:2]))
        return added(self.readout(hs[-1]), eps and eps[2])


CELLS = [eqx.nn.GRUCell(2, 4, key=jr.key(0)), eqx.nn.GRUCell(4, 3, key=jr.key(1))]
STACK = Stack(CELLS, eqx.nn.Linear(3, "scalar", key=jr.key(2)))


def square(model, xs):
    return model(xs) ** 2


@eqx.filter_jit
def explicit_flow(xs):
    eps = [jnp.zeros((len(xs), 4)), jnp.zeros((len(xs), 3)), jnp.zeros(())]
    grads = jax.grad(lambda eps: STACK(xs, eps) ** 2)(eps)
    norms = [jnp.sqrt(jnp.sum(g**2, axis=1)) for g in grads[:2]]
    return {"cells[0]": norms[0], "cells[1]": norms[1], "readout": jnp.abs(grads[2])[None]}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_against_explicit_gradients(wrap):
    def loss(stack, xs):
        values, static = eqx.partition(stack, eqx.is_array)
        call = wrap(lambda values, xs: eqx.combine(values, static)(xs))
        return jax.lax.cond(xs[0, 0] < 100, call, lambda *_: 0.0, values, xs) ** 2

    flow = eqx.filter_jit(eqg.gradient_flow)(loss, STACK, XS)
    assert_close(flow, explicit_flow(XS))


class Parameters(eqx.Module):
    weight: jax.Array
    inner: eqx.nn.Linear


class Net(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    parameters: Parameters

    def __call__(self, x):
        assert type(self.parameters) is Parameters
        return jnp.sum(jnp.tanh(self.linear(x)))


def test_layers_that_are_left_out_and_derivatives_in_the_loss():
    """What is not called is no layer."""
    linear, inner = (eqx.nn.Linear(2, 2, key=jr.key(i)) for i in range(2))
    net = Net(
        linear, eqx.nn.BatchNorm(2, "batch", mode="batch"), Parameters(jnp.ones(2), inner)
    )
    penalty = lambda net, x: jnp.sum(jax.grad(net)(x) ** 2)
    flow = eqg.gradient_flow(penalty, net, jnp.ones(2))
    assert list(flow) == ["linear"]

    # Through the activation only: not through the tangent that passes the layer.
    def of_activation(z):
        slope = jax.vjp(lambda z: jnp.sum(jnp.tanh(z)), z)[1](1.0)[0]
        return jnp.sum((linear.weight.T @ slope) ** 2)

    want = jnp.linalg.norm(jax.grad(of_activation)(linear(jnp.ones(2))))
    assert_close(flow["linear"], want[None])


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
def test_any_cell_over_time(cell):
    """However its scan remembers, and although something stands in the place of the cell."""
    flows = []
    for checkpoint in ("replay", None):
        layer = eqg.nn.Recurrent(cell(3, 4, key=jr.key(0)), checkpoint=checkpoint)
        loss = lambda layer: jnp.sum(layer(jnp.ones((2, 5, 3)))[0])
        flows += eqg.gradient_flow(loss, layer).values()
    assert flows[0].shape == (5,)
    assert_close(flows[0], flows[1])


def test_errors():
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    for where in (lambda s: s.cells[0].weight_ih, lambda s: (s.readout, linear)):
        with pytest.raises(RuleError, match="or not all layers in `where`"):
            eqg.gradient_flow(square, STACK, XS, where=where)
    where = lambda s: (s.readout, s.cells[0])
    with pytest.raises(RuleError, match=r"not called.\n  they are: cells\[0\]"):
        eqg.gradient_flow(lambda s: s.readout(jnp.ones(3)), STACK, where=where)

    def in_while(linear, x):
        loop = jax.lax.while_loop(lambda x: x[0] > 10, lambda x: linear(x), x)
        return jnp.sum(jax.lax.stop_gradient(loop))

    def in_rule(linear, x):
        f = jax.custom_jvp(linear)
        f.defjvp(lambda x, t: (f(*x), t[0]))
        return jnp.sum(f(x))

    for loss, kind in ((in_while, "while"), (in_rule, "custom_jvp_call")):
        with pytest.raises(RuleError, match=f"`Linear` is called inside a `{kind}`"):
            eqg.gradient_flow(loss, linear, jnp.ones(2))


@pytest.mark.parametrize("limits", [None, (1e-9, 1e9)])
def test_plot(limits, monkeypatch):
    numbers = np.array([1e-12, 1e-6, 0.0, 1.0, 1e6]), np.array([np.nan, np.nan, 1e20, 1.0, 1.0])
    flow = {"cell": numbers[0], "blown up": numbers[1], "readout": jnp.ones(1)}
    figure = Figure()
    axes = eqg.plot_gradient_flow(flow, axes=figure.add_subplot(), limits=limits)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(flow)
    cell, blown_up, readout = axes.collections
    assert (cell.norm.vmin, cell.norm.vmax) == (limits or (1e-12, 1e20))
    assert readout.get_datalim(axes.transData).width == 5
    figure.canvas.draw()
    colors = lambda mesh: mesh.to_rgba(mesh.get_array()).reshape(-1, 4)
    viridis = mpl.colormaps["viridis"]
    assert np.all(colors(blown_up)[:2, :3] == [1.0, 0.0, 0.0])
    np.testing.assert_allclose(colors(blown_up)[2], viridis(1.0))
    assert tuple(colors(cell)[2][:3]) == (0.0, 0.0, 0.0)  # zero
    first = colors(cell)[0]  # below the scale
    np.testing.assert_allclose(first, viridis(0.0) if limits is None else (0, 0, 0, 1))
    with pytest.raises(RuleError, match="given nothing to draw"):
        eqg.plot_gradient_flow({})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"`pip install eqx-grads\[plot\]`"):
        eqg.plot_gradient_flow(flow)
