"""The gradient that passes a point, against gradients with respect to what is added there."""

import contextlib
import functools as ft
import sys

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib as mpl
import numpy as np
import pytest
from eqx_grads import GradientStatistics, RuleError
from jax.sharding import AxisType, PartitionSpec as Spec
from matplotlib.figure import Figure

from .helpers import assert_close


N, STEPS = 3, 5
WEIGHT = jnp.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4], [1.1, 0.1, 0.6]])
XS = jnp.sin(jnp.arange(STEPS * N, dtype=WEIGHT.dtype)).reshape(STEPS, N)


def step(h, x):
    return jnp.tanh(WEIGHT @ h + x)


def recurrent(see, slots, xs=XS):
    """A loss of a recurrent network, in which `see(h, slot)` is called at every step."""

    def body(h, x_and_slot):
        h = see(step(h, x_and_slot[0]), x_and_slot[1])
        return h, jnp.sum(h**2)

    return jnp.sum(jax.lax.scan(body, jnp.zeros(N, WEIGHT.dtype), (xs, slots))[1])


def stacked_gradients(xs=XS):
    """The witness: plain autodiff with respect to a term added to each activation."""
    zeros = jnp.zeros((STEPS, N), WEIGHT.dtype)
    return jax.grad(ft.partial(recurrent, jnp.add, xs=xs))(zeros)


class TestProbe:
    def test_one_gradient_for_each_step(self):
        slots = jnp.full((STEPS, N), jnp.nan, WEIGHT.dtype)  # its values do not matter
        of_slots = ft.partial(recurrent, eqg.probe)
        want = stacked_gradients()
        value, got = jax.value_and_grad(of_slots)(slots)
        assert_close(got, want)
        assert_close(value, recurrent(lambda h, _: h, slots))
        programs = [of_slots, jax.jit(of_slots), jax.checkpoint(of_slots)]
        for grads in jax.jit(lambda s: [jax.grad(f)(s) for f in programs])(slots):
            assert_close(grads, want)

    def test_the_hessian_in_a_scan(self):
        """With respect to all activations, also on JAX 0.10 and 0.11."""
        slots = jnp.zeros((STEPS, N), WEIGHT.dtype)
        second = lambda see: jax.jit(jax.hessian(ft.partial(recurrent, see)))(slots)
        assert_close(second(eqg.probe), second(jnp.add))

    def test_trees(self):
        x = {"a": 1.0, "b": jnp.ones(2), "n": 3, "name": "x", "none": None}
        f = lambda slot: jnp.sum(eqg.probe(x, slot)["b"] * jnp.array([2.0, 3.0]))
        slot = {"a": 0.0, "b": jnp.zeros(2), "n": None, "name": None, "none": None}
        got = jax.grad(f)(slot)
        assert got["a"] == 0.0
        assert_close(got["b"], jnp.array([2.0, 3.0]))
        only_a = {**slot, "b": None}
        assert jax.grad(f)(only_a)["b"] is None
        assert eqg.probe(x, None) == x

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("shared", ["x", "slot", "neither"])
    def test_shard_map(self, shared, check_vma):
        """A slot that the devices share holds the sum over them."""
        mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
        x, slots = jnp.arange(4.0), jnp.zeros(4)
        weights = jnp.array([1.0, 2.0, 3.0, 4.0])
        specs = (
            Spec() if shared == "x" else Spec("i"),
            Spec() if shared == "slot" else Spec("i"),
            Spec("i"),
        )
        x, slots = x[:1] if shared == "x" else x, slots[:1] if shared == "slot" else slots
        f = jax.shard_map(
            lambda x, slot, w: jnp.sin(eqg.probe(x, slot)) * w,
            mesh=mesh,
            in_specs=specs,
            out_specs=Spec("i"),
            check_vma=check_vma,
        )
        grads = jax.jit(jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1)))(x, slots, weights)
        plain = lambda x, slots, w: jnp.sum(jnp.sin(x + slots) * w)
        assert_close(grads, jax.grad(plain, (0, 1))(x, slots, weights))

    @pytest.mark.parametrize(
        ("x", "slot", "match"),
        [
            (jnp.zeros(N), jnp.zeros((1, N)), r"does not fit.\n  x is float"),
            (jnp.zeros(N), jnp.zeros(N, int), r"does not fit.\n  x is float"),
            ({"a": 1.0}, {"b": 1.0}, r"does not fit.\n  at slot"),
            (jnp.zeros(3), GradientStatistics(7), r"given several slots(?s:.)*shape \(7,\)"),
        ],
    )
    def test_wrong_slot(self, x, slot, match):
        with pytest.raises(RuleError, match=match):
            eqg.probe(x, slot)


class TestStatistics:
    def test_nothing_overflows(self):
        x = jnp.zeros(2, jnp.float32)
        pull = jax.vjp(lambda slot: eqg.probe(x, slot), GradientStatistics())[1]
        norm = pull(jnp.array([3e30, 4e30], jnp.float32))[0].norm
        assert np.isclose(norm, 5e30, rtol=1e-6)
        half = jnp.zeros(2, jnp.float16)
        pull = jax.vjp(lambda slot: eqg.probe(half, slot), GradientStatistics())[1]
        assert_close(pull(jnp.full(2, 3e4, jnp.float16))[0].max, jnp.array(3e4))

    @pytest.mark.cost
    def test_does_not_keep_the_gradient(self):
        """The scan stacks four numbers for each step, and no array like the activation."""
        size = 1000
        slots, h = GradientStatistics(50), jnp.zeros(size)

        def loss(slots):
            body = lambda h, slot: (eqg.probe(2 * h, slot), None)
            return jnp.sum(jax.lax.scan(body, h, slots)[0])

        memory = jax.jit(jax.grad(loss)).lower(slots).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 10 * h.nbytes


class Log:
    """What a callback has seen."""

    def __init__(self):
        self.seen = []

    def __call__(self, gradient, *args):
        self.seen.append((*map(int, args), *np.atleast_1d(np.asarray(gradient)).tolist()))

    def take(self):
        jax.effects_barrier()
        seen, self.seen = self.seen, []
        return seen


@pytest.mark.parametrize("ordered", [False, True])
class TestTap:
    @pytest.mark.parametrize("checkpoint", [False, True])
    def test_scan(self, ordered, checkpoint):
        log = Log()

        def loss(h):
            def body(h, t):
                return eqg.tap_gradient(2 * h, log, t, ordered=ordered), None

            return jax.lax.scan(body, h, jnp.arange(3))[0]

        loss = jax.checkpoint(loss) if checkpoint else loss
        assert jax.jit(jax.grad(loss))(1.0) == 8.0
        assert log.take() == [(2, 1.0), (1, 2.0), (0, 4.0)]

    def test_what_it_raises_stops_the_program(self, ordered):
        def stop(gradient):
            raise ValueError(f"a gradient of {gradient}")

        f = lambda x: eqg.tap_gradient(x, stop, ordered=ordered) ** 2
        with pytest.raises(Exception, match=r"a gradient of 6\.0"):
            jax.block_until_ready(jax.jit(jax.grad(f))(3.0))
        with contextlib.suppress(Exception):  # which JAX keeps for whoever waits for it
            jax.effects_barrier()


def roots(h, name="h"):
    """At step 1, the root of zero."""

    def body(h, t):
        h = eqg.watch_gradient({"h": h}, name, step=t)["h"]
        return jnp.sqrt(h) - 1, None

    return jax.lax.scan(body, h, jnp.arange(2))[0]


MESSAGE = (
    r"The gradient of `h` is not finite at step 1.\n"
    r"  at h\['h'\]: 0 NaN and 1 infinite of 1 elements\n"
)


class TestWatch:
    @pytest.mark.parametrize(
        "program",
        [
            jax.grad(roots),
            jax.jit(jax.grad(roots)),
            jax.grad(jax.checkpoint(roots)),
            lambda h: jax.jit(jax.vmap(jax.grad(roots)))(jnp.array([4.0, h, 9.0])),
            lambda h: jax.grad(lambda hs: jnp.sum(jax.vmap(roots)(hs)))(jnp.array([4.0, h])),
        ],
        ids=["eager", "jit", "checkpoint", "vmap(grad)", "grad(vmap)"],
    )
    def test_names_the_point_the_leaf_and_the_step(self, program):
        with pytest.raises(Exception, match=MESSAGE):
            jax.block_until_ready(program(1.0))

    def test_is_silent_otherwise(self):
        plain = lambda h: jnp.sqrt(jnp.sqrt(h) - 1) - 1
        xs = jnp.array([4.0, 16.0])
        assert_close(jax.jit(jax.vmap(jax.grad(roots)))(xs), jax.vmap(jax.grad(plain))(xs))
        assert_close(jax.hessian(roots)(4.0), jax.hessian(plain)(4.0))
        # What forward mode meets is not watched.
        assert jax.jvp(roots, (1.0,), (1.0,))[1] == jnp.inf


# ---------------------------------------------------------------- gradient_flow


class Stack(eqx.Module):
    """Two recurrent layers, and a readout of the last step."""

    cells: list[eqx.nn.GRUCell]
    readout: eqx.nn.Linear
    scale: float = 1.0

    def __init__(self, *, key):
        keys = jr.split(key, 3)
        self.cells = [eqx.nn.GRUCell(2, 4, key=keys[0]), eqx.nn.GRUCell(4, 3, key=keys[1])]
        self.readout = eqx.nn.Linear(3, "scalar", key=keys[2])

    def hidden(self):
        return [jnp.zeros(cell.hidden_size) for cell in self.cells]

    def __call__(self, xs):
        def body(hs, x):
            h0 = self.cells[0](x, hs[0])
            h1 = self.cells[1](h0, hs[1])
            return [h0, h1], None

        hs, _ = jax.lax.scan(body, self.hidden(), xs)
        return self.readout(hs[-1])

    def perturbed(self, eps, xs):
        """The same, with something added to each activation."""

        def body(hs, x_and_eps):
            x, eps = x_and_eps
            h0 = self.cells[0](x, hs[0]) + eps[0]
            h1 = self.cells[1](h0, hs[1]) + eps[1]
            return [h0, h1], None

        hs, _ = jax.lax.scan(body, self.hidden(), (xs, eps[:2]))
        return self.readout(hs[-1]) + eps[2]


@pytest.fixture(scope="module")
def stack():
    return Stack(key=jr.key(0))


def square(model, xs):
    return model(xs) ** 2


@eqx.filter_jit
def explicit_flow(stack, xs):
    eps = [jnp.zeros((len(xs), 4)), jnp.zeros((len(xs), 3)), jnp.zeros(())]
    grads = jax.grad(lambda eps: stack.perturbed(eps, xs) ** 2)(eps)
    norms = [jnp.sqrt(jnp.sum(g**2, axis=1)) for g in grads[:2]]
    return {
        "cells[0]": norms[0],
        "cells[1]": norms[1],
        "readout": jnp.abs(grads[2])[None],
    }


class TestGradientFlow:
    @pytest.mark.slow
    def test_against_explicit_gradients(self, stack, getkey):
        xs = jr.normal(getkey(), (7, 2))
        flow = eqg.gradient_flow(square, stack, xs)
        assert list(flow) == ["cells[0]", "cells[1]", "readout"]
        assert_close(flow, explicit_flow(stack, xs))

    @pytest.mark.slow
    @pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
    def test_through_other_transformations(self, stack, getkey, wrap):
        xs = jr.normal(getkey(), (4, 2))

        def loss(stack, xs):
            values, static = eqx.partition(stack, eqx.is_array)
            call = wrap(lambda values, xs: eqx.combine(values, static)(xs))
            return jax.lax.cond(xs[0, 0] < 100, call, lambda *_: 0.0, values, xs) ** 2

        flow = eqx.filter_jit(eqg.gradient_flow)(loss, stack, xs)
        assert_close(flow, explicit_flow(stack, xs))

    @pytest.mark.slow
    def test_a_batch(self, stack, getkey):
        """The norm over the whole batch."""
        batch = jr.normal(getkey(), (5, 4, 2))
        total = lambda stack, batch: jnp.sum(jax.vmap(stack)(batch) ** 2)
        flow = eqg.gradient_flow(total, stack, batch)
        each = eqx.filter_vmap(explicit_flow, in_axes=(None, 0))(stack, batch)
        want = jax.tree.map(lambda norms: jnp.sqrt(jnp.sum(norms**2, 0)), each)
        assert_close(flow, want)

    def test_where(self, stack, getkey):
        xs = jr.normal(getkey(), (4, 2))
        want = explicit_flow(stack, xs)
        flow = eqg.gradient_flow(square, stack, xs, where=lambda s: s.cells[1])
        assert_close(flow, {"cells[1]": want["cells[1]"]})
        flow = eqg.gradient_flow(square, stack, xs, where=lambda s: (s, s.readout))
        assert_close(flow, {"Stack": want["readout"], "readout": want["readout"]})

    def test_layers_that_are_left_out_and_derivatives_in_the_loss(self, getkey):
        class Net(eqx.Module):
            linear: eqx.nn.Linear
            norm: eqx.nn.BatchNorm
            unused: eqx.nn.Linear

            def __call__(self, x):
                return jnp.sum(jnp.tanh(self.linear(x)))

        linear, unused = (eqx.nn.Linear(2, 2, key=getkey()) for _ in range(2))
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


class TestGradientFlowErrors:
    def test_where_returns_something_else(self, stack, getkey):
        other = eqx.nn.Linear(2, 2, key=getkey())
        for where in (lambda s: s.cells[0].weight_ih, lambda s: (s.readout, other)):
            with pytest.raises(RuleError, match="or not all layers in `where`"):
                eqg.gradient_flow(square, stack, XS, where=where)

    def test_layers_that_are_not_called(self, stack):
        with pytest.raises(RuleError, match=r"not called.\n  they are: cells\[0\]"):
            eqg.gradient_flow(
                lambda s: s.readout(jnp.ones(3)), stack, where=lambda s: (s.readout, s.cells[0])
            )
        with pytest.raises(RuleError, match=r"not called.\n  they are: cells\[0\], cells\[1\]"):
            eqg.gradient_flow(lambda s: 0.0, stack)

    def test_a_place_without_slots(self, getkey):
        linear = eqx.nn.Linear(2, 2, key=getkey())

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


FLOW = {
    "cell": np.array([1e-12, 1e-6, 0.0, 1.0, 1e6]),
    "blown up": np.array([np.nan, np.nan, 1e20, 1.0, 1.0]),
    "readout": jnp.ones(1),
}


class TestPlot:
    @pytest.mark.parametrize("limits", [None, (1e-9, 1e9)])
    def test_cells_and_colors(self, limits):
        figure = Figure()
        axes = eqg.plot_gradient_flow(FLOW, axes=figure.add_subplot(), limits=limits)
        assert [label.get_text() for label in axes.get_yticklabels()] == list(FLOW)
        cell, blown_up, readout = axes.collections
        low, high = limits or (1e-12, 1e20)
        assert (cell.norm.vmin, cell.norm.vmax) == (low, high)
        assert readout.get_datalim(axes.transData).width == 5
        figure.canvas.draw()
        colors = lambda mesh: mesh.to_rgba(mesh.get_array()).reshape(-1, 4)
        viridis = mpl.colormaps["viridis"]
        assert np.all(colors(blown_up)[:2, :3] == [1.0, 0.0, 0.0])
        np.testing.assert_allclose(colors(blown_up)[2], viridis(1.0))
        assert tuple(colors(cell)[2][:3]) == (0.0, 0.0, 0.0)  # zero
        first = colors(cell)[0]  # below the scale
        np.testing.assert_allclose(first, viridis(0.0) if limits is None else (0, 0, 0, 1))

    def test_errors(self, monkeypatch):
        with pytest.raises(RuleError, match="given nothing to draw"):
            eqg.plot_gradient_flow({})
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ModuleNotFoundError, match=r"`pip install eqx-grads\[plot\]`"):
            eqg.plot_gradient_flow(FLOW)


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
def test_gradient_flow_of_any_cell_over_time(cell):
    """However its scan remembers, and although something stands in the place of the cell."""
    flows = []
    for checkpoint in ("replay", None):
        layer = eqg.nn.Recurrent(cell(3, 4, key=jr.key(0)), checkpoint=checkpoint)
        loss = lambda layer: jnp.sum(layer(jnp.ones((2, 5, 3)))[0])
        (flow,) = eqg.gradient_flow(loss, layer).values()
        flows.append(flow)
    assert flows[0].shape == (5,)
    assert_close(flows[0], flows[1])


class _Parameters(eqx.Module):
    weight: jax.Array
    inner: eqx.nn.Linear


class _WithParameters(eqx.Module):
    parameters: _Parameters
    out: eqx.nn.Linear

    def __call__(self, x):
        assert type(self.parameters) is _Parameters
        return self.out(jnp.tanh(self.parameters.weight * self.parameters.inner(x)))


def test_a_module_that_is_not_called_is_no_layer(getkey):
    parameters = _Parameters(jnp.ones(3), eqx.nn.Linear(3, 3, key=getkey()))
    model = _WithParameters(parameters, eqx.nn.Linear(3, 1, key=getkey()))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    flow = eqg.gradient_flow(loss, model, jnp.ones((4, 3)))
    assert list(flow) == ["_WithParameters", "parameters.inner", "out"]
