"""`gradient_flow`: the gradient of each activation, against gradients with respect to what is
added there; and its plot."""

import sys

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


class Net(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    unused: eqx.nn.Linear

    def __call__(self, x):
        return jnp.sum(jnp.tanh(self.linear(x)))


def test_layers_that_are_left_out_and_derivatives_in_the_loss():
    linear, unused = (eqx.nn.Linear(2, 2, key=jr.key(i)) for i in range(2))
    net = Net(linear, eqx.nn.BatchNorm(2, "batch", mode="batch"), unused)
    penalty = lambda net, x: jnp.sum(jax.grad(net)(x) ** 2)
    flow = eqg.gradient_flow(penalty, net, jnp.ones(2))
    assert list(flow) == ["linear"]

    # Through the activation only: not through the tangent that passes the layer.
    def of_activation(z):
        slope = jax.vjp(lambda z: jnp.sum(jnp.tanh(z)), z)[1](1.0)[0]
        return jnp.sum((linear.weight.T @ slope) ** 2)

    want = jnp.linalg.norm(jax.grad(of_activation)(linear(jnp.ones(2))))
    assert_close(flow["linear"], want[None])


class Parameters(eqx.Module):
    weight: jax.Array
    inner: eqx.nn.Linear


class WithParameters(eqx.Module):
    parameters: Parameters
    out: eqx.nn.Linear

    def __call__(self, x):
        assert type(self.parameters) is Parameters
        return self.out(jnp.tanh(self.parameters.weight * self.parameters.inner(x)))


def test_a_module_that_is_not_called_is_no_layer():
    parameters = Parameters(jnp.ones(3), eqx.nn.Linear(3, 3, key=jr.key(0)))
    model = WithParameters(parameters, eqx.nn.Linear(3, 1, key=jr.key(1)))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    flow = eqg.gradient_flow(loss, model, jnp.ones((4, 3)))
    assert list(flow) == ["WithParameters", "parameters.inner", "out"]


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
    two = eqg.nn.GRU(3, 4, num_layers=2, key=jr.key(0))
    both = eqg.gradient_flow(lambda m: loss(m[0]), [two])
    assert list(both) == ["[0].cells[0][0]", "[0].cells[1][0]"]


def test_errors():
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    layers = [eqx.nn.Linear(2, 2, key=jr.key(i)) for i in range(3)]
    loss = lambda layers: jnp.sum(layers[1](jnp.ones(2)))
    for where in (lambda s: s[1].weight, lambda s: (s[1], eqx.nn.Linear(2, 2, key=jr.key(2)))):
        with pytest.raises(RuleError, match="or not all layers in `where`"):
            eqg.gradient_flow(loss, layers, where=where)
    with pytest.raises(RuleError, match=r"not called.\n  they are: \[2\]"):
        eqg.gradient_flow(loss, layers, where=lambda s: (s[1], s[2]))

    for options in ({"loss": None}, {"where": "[1]"}):
        with pytest.raises(RuleError, match="function"):
            eqg.gradient_flow(**{"loss": loss, "model": layers} | options)

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
    import matplotlib.figure

    numbers = np.array([1e-12, 1e-6, 0.0, 1.0, 1e6]), np.array([np.nan, np.nan, 1e20, 1.0, 1.0])
    flow = {"cell": numbers[0], "blown up": numbers[1], "readout": jnp.ones(1)}
    figure = matplotlib.figure.Figure()
    axes = eqg.plot_gradient_flow(flow, axes=figure.add_subplot(), limits=limits)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(flow)
    cell, blown_up, readout = axes.collections
    assert (cell.norm.vmin, cell.norm.vmax) == (limits or (1e-12, 1e20))
    box = readout.get_datalim(axes.transData).bounds
    assert (*box, *axes.get_ylim()) == (-0.5, 1.5, 5, 1, 2.5, -0.5)
    figure.canvas.draw()
    colors = lambda mesh: mesh.to_rgba(mesh.get_array()).reshape(-1, 4)
    viridis = matplotlib.colormaps["viridis"]
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
