"""Spiking layers against their cells in a loop written out, and autodiff of it."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads import RuleError
from eqx_grads._control_flow import accelerators
from eqx_grads.nn._spiking import spiking_scan

from .helpers import assert_close, temp_bytes
from .rules.recurrent import loss, losses_of_one_output, reference


BETA, RHO, ALPHA = ([0.9, 0.5, 0.3, 0.7], [0.95, 0.8, 0.6, 0.4], [0.2, 0.7, 0.4, 0.5])
THRESHOLD = [0.4, 0.6, 0.5, 0.7]
KINDS = {
    "plain": {},
    "adaptive": {"rho": RHO, "strength": [0.6, 1.8, 0.2, 1.0]},
    "current": {"alpha": ALPHA},
    "recurrent": {"recurrent": True},
    "all": {"rho": RHO, "alpha": ALPHA, "recurrent": True},
}
SINGLE = {"dtype": "float32"}


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of two steps: five steps are two full ones and a short one."""
    monkeypatch.setattr(spiking_scan, "chunk_length", lambda xs, n: min(2, xs.shape[0]))


def make(getkey, kind, *, learns=False, layer=nn.LIF, **options):
    """A layer, inputs that make its neurons fire, and a state."""
    options = {"dtype": "float64", **KINDS[kind], **options}
    if learns:
        names = {"beta", *KINDS[kind]} - {"recurrent"}
        if layer is nn.LIF:
            options |= {"threshold": THRESHOLD}
            options |= {"surrogate": eqg.surrogates.atan(jnp.array(1.5))}
            names |= {"threshold"}
        options["learn"] = tuple(names)
    made = layer(3, 4, BETA, key=getkey(), **options)
    stronger = lambda x: 6 * x if eqx.is_array(x) and x.shape[-1:] == (3,) else x
    made = jax.tree.map(stronger, made)
    biases = lambda made: [cell.bias for cells in made.cells for cell in cells]
    made = eqx.tree_at(biases, made, replace_fn=lambda bias: bias + 0.5)
    xs = jr.normal(getkey(), (2, 5, 3), options["dtype"])
    _, state = made(xs)
    return made, xs, jax.tree.map(lambda s: jr.normal(getkey(), s.shape, s.dtype), state)


def run(layer, xs, state, **options):
    return layer(xs, state, **options)


def both(f):
    """The outputs, and the gradients of everything."""
    return eqx.filter_jit(lambda args: (f(*args), eqx.filter_grad(loss(f))(args)))


# ---------------------------------------------------------------- against the cells


@pytest.mark.thorough
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("kind", "reset", "detach", "learns"),
    [
        ("plain", "subtract", True, False),
        ("plain", "zero", False, True),
        ("adaptive", "none", True, False),
        ("adaptive", "subtract", True, True),
        ("current", "zero", True, True),
        ("recurrent", "none", True, False),
        ("all", "subtract", False, True),
        ("all", "zero", False, True),
    ],
)
def test_values_and_gradients(kind, reset, detach, learns, getkey):
    with jax.enable_x64(True):
        args = make(getkey, kind, reset=reset, detach_reset=detach, learns=learns)
        expected = both(reference)(args)
        (spikes, _), _ = expected
        assert 0.1 < jnp.mean(spikes) < 0.9
        got = both(run)(args)
        assert jnp.array_equal(got[0][0], spikes)
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-12)


@pytest.mark.thorough
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", ["plain", "current"])
def test_leaky_integrators(kind, getkey):
    with jax.enable_x64(True):
        args = make(getkey, kind, layer=nn.LI, learns=True)
        assert_close(both(run)(args), both(reference)(args), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("options", [{}, {"reset": "zero"}, {"threshold": None}])
@pytest.mark.parametrize("kind", ["plain", "adaptive", "current", "recurrent"])
def test_gradient_of_one_output(kind, options, getkey):
    """A state of which one field has a gradient, with and without the gradients of constants:
    a loop of the backward pass may have nothing to read."""
    if options.get("threshold", 1.0) is None and kind in ("adaptive", "recurrent"):
        options = {"reset": "none"}  # these neurons spike
    with jax.enable_x64(True):
        args = make(getkey, kind, **options)
        gradients = lambda run: eqx.filter_jit(
            lambda args: [eqx.filter_grad(loss)(args) for loss in losses_of_one_output(run)]
        )
        got, expected = gradients(run)(args), gradients(reference)(args)
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-12)


@pytest.mark.thorough
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("kind", "reverse"), [("current", True), ("all", False)])
def test_padding(kind, reverse, getkey):
    """The padding holds what is not a number, and is not looked at."""
    with jax.enable_x64(True):
        options = {"reverse": reverse, "detach_reset": False, "learns": True}
        layer, xs, state = make(getkey, kind, **options)
        plain = ft.partial(reference, lengths=[5, 2])
        padded = lambda layer, xs, state: layer(
            xs.at[1, 2:].set(jnp.nan), state, lengths=jnp.array([5, 2])
        )
        args = (layer, xs, state)
        got, expected = both(padded)(args), both(plain)(args)
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-12)


@pytest.mark.thorough
@pytest.mark.usefixtures("chunks")
def test_stacked_and_bidirectional(getkey):
    with jax.enable_x64(True):
        args = make(getkey, "recurrent", num_layers=2, bidirectional=True)
        assert args[2].membrane.shape == (4, 2, 4)
        assert_close(both(run)(args), both(reference)(args), tolerance=1e-12)


@pytest.mark.thorough
@pytest.mark.usefixtures("chunks")
def test_neurons_after_a_convolution(getkey):
    """Of the shape of an image, with a decay for each channel and a learned threshold."""
    with jax.enable_x64(True):
        beta = jnp.array([0.9, 0.5]).reshape(2, 1, 1)
        options = {
            "rho": 0.8,
            "strength": 0.3,
            "learn": ("beta", "threshold"),
            "dtype": "float64",
        }
        layer = nn.LIF(None, (2, 3, 2), beta, num_layers=2, **options)
        xs = 1 + 3 * jr.normal(getkey(), (2, 5, 2, 3, 2))
        _, state = layer(xs)

        def loop(layer, xs, state):
            outputs, ends = [], []
            for b in range(2):
                ys, end = xs[b], []
                for i in range(2):
                    s, fired = jax.tree.map(lambda s, i=i, b=b: s[i, b], state), []
                    for y in ys:
                        s = layer.cells[i][0](y, s)
                        fired.append(s.spikes)
                    ys = jnp.stack(fired)
                    end.append(s)
                outputs.append(ys)
                ends.append(jax.tree.map(lambda *s: jnp.stack(s), *end))
            return jnp.stack(outputs), jax.tree.map(lambda *s: jnp.stack(s, 1), *ends)

        args = (layer, xs, state)
        assert 0.1 < jnp.mean(layer(xs)[0]) < 0.9
        assert_close(both(run)(args), both(loop)(args), tolerance=1e-12)
        assert_close(layer(xs[0])[0], layer(xs)[0][0], tolerance=1e-12)
        with pytest.raises(RuleError, match=r"of the wrong size(?s:.)*is \(2, 3, 2\)"):
            layer(xs[:, :, :, :2])
        with pytest.raises(RuleError, match="was given `xs` with 3 axes"):
            layer(xs[0, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_forward_mode_and_second_order(kind, getkey):
    with jax.enable_x64(True):
        layer, xs, state = make(getkey, kind, detach_reset=False, learns=True)
        args = (layer, xs[:1, :3], jax.tree.map(lambda s: s[:1], state))
        dynamic, static = eqx.partition(args, eqx.is_inexact_array)
        over_arrays = lambda f: lambda arrays: loss(f)(eqx.combine(arrays, static))
        for transform in (
            lambda f, d: jax.jvp(f, (d,), (d,)),
            lambda f, d: jax.jvp(jax.grad(f), (d,), (d,))[1],
            lambda f, d: jax.grad(
                lambda d: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(d)))
            )(d),
        ):
            got, expected = (
                jax.jit(ft.partial(transform, over_arrays(f)))(dynamic)
                for f in (run, reference)
            )
            assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-11)


# ---------------------------------------------------------------- transformations, dtypes


@pytest.mark.thorough
def test_vmap(getkey):
    args = make(getkey, "adaptive", learns=True, **SINGLE)
    outside = lambda layer, xs, state: eqx.filter_vmap(run, in_axes=(None, 0, 0))(
        layer, xs, state
    )
    assert_close(both(outside)(args), both(run)(args), tolerance=1e-5)
    of_arrays, static = eqx.partition(args, eqx.is_inexact_array)
    grad = jax.grad(lambda a: loss(outside)(eqx.combine(a, static)))
    assert "[2,4,3]" not in str(jax.make_jaxpr(grad)(of_arrays))


@pytest.mark.thorough
def test_an_ensemble(getkey):
    """Networks of their own, with a decay of their own."""
    make_one = lambda beta, key: nn.LIF(3, 4, beta, learn="beta", key=key)
    keys, betas, xs = jr.split(getkey(), 2), jnp.array([0.3, 0.9]), jr.normal(getkey(), (5, 3))
    grad = eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(xs)[0]))))
    got = eqx.filter_vmap(grad)(eqx.filter_vmap(make_one)(betas, keys))
    for i in range(2):
        expected = grad(make_one(betas[i], keys[i]))
        one = jax.tree.map(lambda g, i=i: g[i], got)
        assert_close(jax.tree.leaves(one), jax.tree.leaves(expected), tolerance=1e-5)


def test_what_is_frozen_costs_nothing(getkey):
    # So large that the gradients of the weights are products, too.
    layer = nn.LIF(64, 64, 0.9, recurrent=True, key=getkey())
    xs = jr.normal(getkey(), (16, 32, 64))
    products = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("dot_general")
    total = lambda layer, xs: jnp.sum(layer(xs)[0])
    everything = products(eqx.filter_grad(lambda args: total(*args)), (layer, xs))
    assert products(eqx.filter_grad(total), layer, xs) == everything - 1
    assert products(jax.grad(total, 1), layer, xs) < everything - 1


def test_chunks_on_an_accelerator(monkeypatch, getkey):
    """A loop in a loop costs launches: there is one for the steps of a chunk, and none for the
    chunks of a sequence like these, which has twenty on a CPU."""
    layer = nn.LIF(32, 256, 0.9, learn="beta", time_major=True, key=getkey())
    xs = jnp.ones((100, 64, 32))
    loops = lambda: str(
        jax.make_jaxpr(
            lambda b: eqx.filter_grad(
                lambda b: jnp.sum(eqx.tree_at(lambda l: l.cells[0][0].beta, layer, b)(xs)[0])
            )(b)
        )(layer.cells[0][0].beta)
    ).count(" scan[")
    assert spiking_scan.chunk_length(xs, 256) == 5
    on_cpu = loops()
    monkeypatch.setattr(accelerators, "on_cpu", lambda: False)
    assert spiking_scan.chunk_length(xs, 256) == 100
    jax.clear_caches()
    assert loops() < on_cpu


@pytest.mark.thorough
@pytest.mark.parametrize("given", ["bfloat16", "float32"])
def test_half_precision(given, getkey):
    """With few binary digits there is nothing to round, so that spikes are the same."""
    options = {"strength": jnp.array(0.5, "bfloat16"), "learn": ("beta", "rho", "threshold")}
    layer = nn.LIF(3, 4, 0.5, rho=0.5, dtype="bfloat16", key=getkey(), **options)
    weight = jnp.round(4 * jr.normal(getkey(), (4, 3), "float32")).astype("bfloat16") / 4
    where = lambda layer: (layer.cells[0][0].weight_ih, layer.cells[0][0].bias)
    layer = eqx.tree_at(where, layer, (weight, jnp.zeros(4, "bfloat16")))
    xs = jnp.round(2 * jr.normal(getkey(), (2, 4, 3), "float32")).astype(given) / 2
    ys, state = layer(xs)
    grads = eqx.filter_grad(lambda layer: jnp.sum(layer(xs)[0]))(layer)
    wide = jax.tree.map(lambda x: x.astype("float32") if eqx.is_array(x) else x, layer)
    expected, _ = wide(xs.astype("float32"))
    exact = eqx.filter_grad(lambda layer: jnp.sum(layer(xs.astype("float32"))[0]))(wide)
    assert ys.dtype == state.membrane.dtype == "bfloat16"
    assert 0 < jnp.mean(expected) < 1
    assert jnp.array_equal(ys.astype("float32"), expected)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert got.dtype == "bfloat16"
        assert_close(got.astype("float32"), want, tolerance=0.05)


@pytest.mark.thorough
def test_no_step_and_no_example(getkey):
    for kind, shape in (("all", (2, 0, 3)), ("current", (0, 5, 3))):
        layer = nn.LIF(3, 4, BETA, learn="beta", key=getkey(), **KINDS[kind])
        ys, end = layer(jnp.ones(shape))
        assert ys.shape == (*shape[:2], 4)
        assert end.membrane.shape == (shape[0], 4)
        grads = eqx.filter_grad(lambda layer, s=shape: jnp.sum(layer(jnp.ones(s))[0]))(layer)
        assert all(jnp.all(g == 0) for g in jax.tree.leaves(grads))


def test_inputs_of_integers(getkey):
    layer = nn.LIF(3, 4, 0.9, key=getkey())
    counts = jr.randint(getkey(), (5, 3), 0, 4)
    assert_close(layer(counts), layer(counts.astype(layer(counts)[0].dtype)), tolerance=0.0)


# ---------------------------------------------------------------- cells, states


def test_cells(getkey):
    """A layer is its cell in `Recurrent`."""
    layer, xs, state = make(getkey, "all", **SINGLE)
    ((cell,),) = layer.cells
    assert (cell.input_size, cell.hidden_size) == (3, 4)
    for same in (nn.Recurrent(cell), nn.Recurrent(cell, checkpoint=3)):
        assert_close(same(xs, state), layer(xs, state), tolerance=1e-6)
    learned = nn.Recurrent(cell, learn_initial_state=True)
    assert isinstance(learned.initial_state, nn.LIFState)


@pytest.mark.thorough
def test_a_sequence_in_two_parts_and_a_learned_state(getkey):
    layer, xs, _ = make(getkey, "recurrent", learn_initial_state=True, **SINGLE)
    whole, end = layer(xs[0])
    first, half = layer(xs[0, :2])
    second, last = layer(xs[0, 2:], half)
    assert jnp.array_equal(whole, jnp.concatenate([first, second]))
    assert_close(last, end, tolerance=1e-6)
    total = lambda layer: jnp.sum(layer(xs)[1].membrane)
    assert jnp.all(eqx.filter_grad(total)(layer).initial_state.membrane != 0)


def test_gradient_flow_per_step(getkey):
    layer, xs, _ = make(getkey, "recurrent", **SINGLE)
    total = lambda layer: jnp.sum(layer(xs)[0])
    assert eqg.gradient_flow(total, layer)["cells[0][0]"].shape == (5,)


# ---------------------------------------------------------------- cost


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
        def train(arrays, xs):
            both = lambda arrays, xs: run(eqx.combine(arrays, static), xs)
            spikes, pull_back = jax.vjp(both, arrays, xs)
            return spikes, pull_back(ct)

        return temp_bytes(train, arrays, xs)

    assert of(lambda layer, xs: layer(xs)[0]) < most * of(plain)


# ---------------------------------------------------------------- errors


def test_wrong_arguments(getkey):
    key = getkey()
    for make, match in (
        (lambda: nn.LIF(0, 4, 0.9, key=key), r"`LIF` was given a size(?s:.)*`input_size` is 0"),
        (lambda: nn.LIF(3, 4, 0.9, num_layers=0, key=key), "`num_layers` is 0"),
        (lambda: nn.LI(3, 4, 1.1, key=key), "`beta` of `LIFCell` is not from zero to one"),
        (lambda: nn.LIF(3, 4, 0.9), "`key` of `LIFCell` is not a random key"),
        (lambda: nn.LIF(3, (2, 2), 0.9, key=key), r"`hidden_size` is \(2, 2\)"),
        (lambda: nn.LIF(3, 4, 0.9, keep="spikes", key=key), "unexpected keyword.*'keep'"),
    ):
        with pytest.raises((RuleError, TypeError), match=match):
            make()


def test_no_key():
    options = {"num_layers": 2, "learn": "beta", "learn_initial_state": True}
    layer = nn.LIF(None, 4, 0.9, rho=0.8, **options)
    assert eqx.tree_equal(layer, nn.LIF(None, 4, 0.9, rho=0.8, key=jr.key(1), **options))
    assert layer(jnp.ones((5, 4)))[0].shape == (5, 4)
    with pytest.raises(RuleError, match=r"`LIF` was given inputs of the wrong size"):
        layer(jnp.ones((5, 3)))


def test_inputs(getkey):
    layer = nn.LIF(3, 4, 0.9, key=getkey())
    with pytest.raises(RuleError, match="`LIF` was given inputs of the wrong size"):
        layer(jnp.ones((5, 4)))
    with pytest.raises(RuleError, match="`xs` is complex64"):
        layer(jnp.ones((5, 3), "complex64"))
    with pytest.raises(RuleError, match="`LIF` was given a `state` that does not fit"):
        layer(jnp.ones((5, 3)), jnp.zeros(4))
