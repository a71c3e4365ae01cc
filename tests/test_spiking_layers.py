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
from eqx_grads.nn._spiking import layer_vjp

from .helpers import assert_close, checking_leaks, temp_bytes
from .rules.recurrent import loss, losses_of_one_output, reference


BETA, RHO, ALPHA = ([0.9, 0.5, 0.3, 0.7], [0.95, 0.8, 0.6, 0.4], [0.2, 0.7, 0.4, 0.5])
DECAYS = {
    "LIF": {"beta": BETA},
    "ALIF": {"beta": BETA, "rho": RHO},
    "CuBaLIF": {"alpha": ALPHA, "beta": BETA},
    "LI": {"beta": BETA},
    "RLIF": {"beta": BETA},
    "RALIF": {"beta": BETA, "rho": RHO},
    "RCuBaLIF": {"alpha": ALPHA, "beta": BETA},
}
RESETS = ("subtract", "zero", "none")
OF_SPIKES = [name for name in DECAYS if name != "LI"]
# Each option of the cells with some layer, and all of them with the slow tests.
QUICK = {
    ("LIF", "subtract", True, False),
    ("LIF", "zero", False, True),
    ("RALIF", "zero", True, True),
    ("RCuBaLIF", "subtract", False, True),
    ("ALIF", "none", True, False),
}
ONE_OUTPUT = {("LI", "none"), ("LIF", "zero"), ("CuBaLIF", "none")}
CASES = [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
    for case in [
        (name, reset, detach, learn)
        for name in OF_SPIKES
        for reset in RESETS
        for detach in (True, False)
        for learn in (True, False)
    ]
]


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of two steps: five steps are two full ones and a short one."""
    monkeypatch.setattr(layer_vjp, "chunk_length", lambda xs, n: min(2, xs.shape[0]))


def learned(name):
    """Options under which all constants of a layer are learned."""
    options = {f"learn_{decay}": True for decay in DECAYS[name]}
    if name == "LI":
        return options
    surrogate = eqg.surrogates.atan(jnp.array(1.5))
    threshold = jnp.array([0.4, 0.6, 0.5, 0.7])
    return {**options, "learn_threshold": True, "threshold": threshold, "surrogate": surrogate}


def make(getkey, name, *, steps=5, batch=2, dtype="float64", **options):
    """A layer, inputs that make its neurons fire, and a state."""
    layer = getattr(nn, name)(3, 4, **DECAYS[name], dtype=dtype, key=getkey(), **options)
    stronger = lambda x: 6 * x if eqx.is_array(x) and x.shape[-1:] == (3,) else x
    layer = jax.tree.map(stronger, layer)
    biases = lambda layer: [cell.bias for cells in layer.cells for cell in cells]
    layer = eqx.tree_at(biases, layer, replace_fn=lambda bias: bias + 0.5)
    xs = jr.normal(getkey(), (batch, steps, 3), dtype)
    _, state = layer(xs)
    state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape, s.dtype), state)
    return layer, xs, state


def run(layer, xs, state, **options):
    return layer(xs, state, **options)


def both(f):
    """The outputs, and the gradients of everything."""
    return eqx.filter_jit(lambda args: (f(*args), eqx.filter_grad(loss(f))(args)))


def keeping(keep, layer):
    """The same layer of one cell, with other residuals."""
    options = {"keep": keep, "reverse": layer.reverse, "time_major": layer.time_major}
    return type(layer).from_cell(layer.to_cell(), **options)


# ---------------------------------------------------------------- against the cells


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("name", "reset", "detach", "learn"), CASES)
def test_values_and_gradients(name, reset, detach, learn, getkey):
    with jax.enable_x64(True):
        options = learned(name) if learn else {}
        args = make(getkey, name, reset=reset, detach_reset=detach, **options)
        expected = both(reference)(args)
        (spikes, _), _ = expected
        assert 0.1 < jnp.mean(spikes) < 0.9
        layer, *rest = args
        for keep in ("membranes", "spikes"):
            got = both(run)((keeping(keep, layer), *rest))
            assert jnp.array_equal(got[0][0], spikes)
            assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
def test_leaky_integrators(getkey):
    with jax.enable_x64(True):
        args = make(getkey, "LI", **learned("LI"))
        assert_close(both(run)(args), both(reference)(args), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("name", "reset"),
    [
        case if case in ONE_OUTPUT else pytest.param(*case, marks=pytest.mark.slow)
        for case in [("LI", "none"), *((name, r) for name in OF_SPIKES for r in RESETS)]
    ],
)
def test_gradient_of_one_output(name, reset, getkey):
    """A state of which one field has a gradient, with and without the gradients of constants:
    a loop of the backward pass may have nothing to read."""
    options = {} if name == "LI" else {"reset": reset}
    with jax.enable_x64(True):
        layer, *rest = make(getkey, name, **options)
        gradients = lambda run: eqx.filter_jit(
            lambda args: [eqx.filter_grad(loss)(args) for loss in losses_of_one_output(run)]
        )
        expected = gradients(reference)((layer, *rest))
        for keep in ("membranes", "spikes") if name != "LI" else (None,):
            same = layer if keep is None else keeping(keep, layer)
            got = gradients(run)((same, *rest))
            assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    "name", ["CuBaLIF", *(pytest.param(n, marks=pytest.mark.slow) for n in ("LIF", "RALIF"))]
)
@pytest.mark.parametrize("reverse", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_padding(name, reverse, getkey):
    """The padding holds what is not a number, and is not looked at."""
    with jax.enable_x64(True):
        layer, xs, state = make(
            getkey, name, reverse=reverse, detach_reset=False, **learned(name)
        )
        plain = ft.partial(reference, lengths=[5, 2])
        padded = lambda layer, xs, state: layer(
            xs.at[1, 2:].set(jnp.nan), state, lengths=jnp.array([5, 2])
        )
        args = (layer, xs, state)
        for keep in ("membranes", "spikes"):
            got = both(padded)((keeping(keep, layer), xs, state))
            assert_close(
                jax.tree.leaves(got), jax.tree.leaves(both(plain)(args)), tolerance=1e-12
            )


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["RLIF", pytest.param("ALIF", marks=pytest.mark.slow)])
def test_stacked_and_bidirectional(name, getkey):
    with jax.enable_x64(True):
        args = make(getkey, name, num_layers=2, bidirectional=True)
        assert args[2].membrane.shape == (4, 2, 4)
        assert_close(both(run)(args), both(reference)(args), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["LIF", pytest.param("RCuBaLIF", marks=pytest.mark.slow)])
def test_without_input_weights(name, getkey):
    with jax.enable_x64(True):
        options = {"dtype": "float64", "use_input_weight": False, "num_layers": 2}
        layer = getattr(nn, name)(4, 4, **DECAYS[name], key=getkey(), **options)
        assert isinstance(layer.cells[1][0], getattr(nn, name + "Cell"))
        xs = 2 * jr.normal(getkey(), (2, 5, 4))
        _, state = layer(xs)
        args = (layer, xs, state)
        assert_close(both(run)(args), both(reference)(args), tolerance=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["LIF", pytest.param("RALIF", marks=pytest.mark.slow)])
def test_forward_mode_and_second_order(name, getkey):
    with jax.enable_x64(True):
        layer, xs, state = make(
            getkey, name, steps=3, batch=1, detach_reset=False, **learned(name)
        )
        for keep in ("membranes", "spikes"):
            args = (keeping(keep, layer), xs, state)
            dynamic, static = eqx.partition(args, eqx.is_inexact_array)
            over_arrays = lambda f, s=static: lambda arrays: loss(f)(eqx.combine(arrays, s))
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


SINGLE = {"dtype": "float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ALIF", pytest.param("RLIF", marks=pytest.mark.slow)])
def test_vmap(name, getkey):
    args = make(getkey, name, **SINGLE)
    outside = lambda layer, xs, state: eqx.filter_vmap(run, in_axes=(None, 0, 0))(
        layer, xs, state
    )
    assert_close(both(outside)(args), both(run)(args), tolerance=1e-5)
    jaxpr = str(jax.make_jaxpr(eqx.filter_grad(loss(outside)))(args))
    assert f"[2,{args[0].cells[0][0].weight_ih.shape[0]},3]" not in jaxpr


@pytest.mark.slow
def test_an_ensemble(getkey):
    """Networks of their own, with a decay of their own."""
    make_one = lambda beta, key: nn.LIF(3, 4, beta, learn_beta=True, key=key)
    keys, betas, xs = jr.split(getkey(), 2), jnp.array([0.3, 0.9]), jr.normal(getkey(), (5, 3))
    grad = eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(xs)[0]))))
    got = eqx.filter_vmap(grad)(eqx.filter_vmap(make_one)(betas, keys))
    for i in range(2):
        expected = grad(make_one(betas[i], keys[i]))
        one = jax.tree.map(lambda g, i=i: g[i], got)
        assert_close(jax.tree.leaves(one), jax.tree.leaves(expected), tolerance=1e-5)


@pytest.mark.slow
def test_checkpoint_scan_and_leaks(getkey):
    args = make(getkey, "RLIF", steps=3, **SINGLE)
    expected = eqx.filter_jit(eqx.filter_grad(loss(run)))(args)

    def in_scan(layer, xs, state):
        """Each step by itself, in a scan."""

        def step(state, x):
            ys, state = eqg.filter_checkpoint(run)(layer, x[:, None], state)
            return state, ys[:, 0]

        state, ys = jax.lax.scan(step, state, jnp.swapaxes(xs, 0, 1))
        return jnp.swapaxes(ys, 0, 1), state

    with checking_leaks():
        got = eqx.filter_jit(eqx.filter_grad(loss(in_scan)))(args)
    assert_close(got, expected, tolerance=1e-5)


def test_what_is_frozen_costs_nothing(getkey):
    # So large that the gradients of the weights are products, too.
    layer = nn.RLIF(64, 64, 0.9, key=getkey())
    xs = jr.normal(getkey(), (16, 32, 64))
    products = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("dot_general")
    total = lambda layer, xs: jnp.sum(layer(xs)[0])
    everything = products(eqx.filter_grad(lambda args: total(*args)), (layer, xs))
    assert products(eqx.filter_grad(total), layer, xs) == everything - 1
    assert products(jax.grad(total, 1), layer, xs) < everything - 1


@pytest.mark.slow
@pytest.mark.parametrize("given", ["bfloat16", "float32"])
def test_half_precision(given, getkey):
    """With few binary digits there is nothing to round, so that spikes are the same."""
    layer = nn.LIF(3, 4, 0.5, learn_beta=True, dtype="bfloat16", key=getkey())
    weight = jnp.round(4 * jr.normal(getkey(), (4, 3), "float32")).astype("bfloat16") / 4
    where = lambda layer: (layer.cells[0][0].weight_ih, layer.cells[0][0].bias)
    layer = eqx.tree_at(where, layer, (weight, jnp.zeros(4, "bfloat16")))
    xs = jnp.round(2 * jr.normal(getkey(), (2, 4, 3), "float32")).astype(given) / 2
    with jax.numpy_dtype_promotion("standard"):
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
    for name, shape in (("RALIF", (2, 0, 3)), ("CuBaLIF", (0, 5, 3))):
        layer = getattr(nn, name)(3, 4, **DECAYS[name], key=getkey())
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


@pytest.mark.parametrize("name", DECAYS)
def test_cells(name, getkey):
    layer, xs, _ = make(getkey, name, **SINGLE)
    cell = layer.to_cell()
    assert isinstance(cell, nn.WeightedCell)
    assert (cell.input_size, cell.hidden_size) == (3, 4)
    again = getattr(nn, name).from_cell(cell, time_major=True)
    assert eqx.tree_equal(again.to_cell(), cell)
    assert_close(again(jnp.swapaxes(xs, 0, 1))[1], layer(xs)[1], tolerance=1e-6)
    assert_close(nn.Recurrent(cell)(xs), layer(xs), tolerance=1e-6)
    bare = getattr(nn, name).from_cell(cell.cell, learn_initial_state=True)
    assert eqx.tree_equal(bare.to_cell(), cell.cell)
    assert bare(jnp.ones((5, 4)))[0].shape == (5, 4)
    assert isinstance(bare.initial_state, type(cell.initial_state()))


@pytest.mark.thorough
def test_a_sequence_in_two_parts_and_a_learned_state(getkey):
    layer, xs, _ = make(getkey, "RLIF", learn_initial_state=True, **SINGLE)
    whole, end = layer(xs[0])
    first, half = layer(xs[0, :2])
    second, last = layer(xs[0, 2:], half)
    assert jnp.array_equal(whole, jnp.concatenate([first, second]))
    assert_close(last, end, tolerance=1e-6)
    total = lambda layer: jnp.sum(layer(xs)[1].membrane)
    assert jnp.all(eqx.filter_grad(total)(layer).initial_state.membrane != 0)


def test_gradient_flow_per_step(getkey):
    layer, xs, _ = make(getkey, "RLIF", **SINGLE)
    total = lambda layer: jnp.sum(layer(xs)[0])
    assert eqg.gradient_flow(total, layer)["cells[0][0]"].shape == (5,)


@pytest.mark.slow
def test_dropout_and_casting(getkey):
    layer = nn.LIF(3, 4, 0.5, num_layers=2, dropout=0.5, key=getkey(), **SINGLE)
    xs, key = 3 * jr.normal(getkey(), (2, 20, 3), "float32"), getkey()
    dropped = layer(xs, key=key)[0]
    assert not jnp.array_equal(dropped, layer(xs, key=key, inference=True)[0])
    half = jax.tree.map(lambda x: x.astype("float16") if eqx.is_array(x) else x, layer)
    assert half(xs.astype("float16"), inference=True)[1].membrane.dtype == "float16"


# ---------------------------------------------------------------- cost


@pytest.mark.cost
def test_memory(getkey):
    """With learned constants, autodiff saves the potentials, the spikes and the slopes."""
    options = {"learn_beta": True, "learn_threshold": True, "time_major": True}
    xs, ct = jnp.ones((1000, 16, 32)), jnp.ones((1000, 16, 64))

    def plain(layer, xs):
        cell = layer.to_cell()

        def step(state, x):
            state = jax.vmap(cell)(x, state)
            return state, state.spikes

        zero = jax.tree.map(lambda s: jnp.zeros((16, *s.shape)), cell.initial_state())
        return jax.lax.scan(step, zero, xs)[1]

    def train(run):
        def spikes_and_gradients(layer, xs):
            spikes, pull_back = eqx.filter_vjp(run, layer, xs)
            return spikes, pull_back(ct)

        return spikes_and_gradients

    layer = nn.LIF(32, 64, 0.9, key=getkey(), **options)
    arrays, static = eqx.partition(layer, eqx.is_array)
    of = lambda run, s=static: temp_bytes(
        train(lambda arrays, xs: run(eqx.combine(arrays, s), xs)), arrays, xs
    )
    ours = lambda keep: of(lambda layer, xs: keeping(keep, layer)(xs)[0])
    assert ours("membranes") < 0.5 * of(plain)
    assert ours("spikes") < 0.2 * of(plain)


# ---------------------------------------------------------------- errors


class TestErrors:
    def test_options(self, getkey):
        key = getkey()
        with pytest.raises(RuleError, match=r"(?s)`LIF` was given an unknown `keep`.*'spikes'"):
            nn.LIF(3, 4, 0.9, keep="gates", key=key)
        with pytest.raises(RuleError, match=r"(?s)`ALIF` was given a size.*`input_size` is 0"):
            nn.ALIF(0, 4, 0.9, 0.9, key=key)
        with pytest.raises(RuleError, match=r"(?s)`RLIF` was given a size.*`num_layers` is 0"):
            nn.RLIF(3, 4, 0.9, num_layers=0, key=key)
        with pytest.raises(RuleError, match="`LICell` was given a `beta` that is not between"):
            nn.LI(3, 4, 1.1, key=key)
        with pytest.raises(RuleError, match=r"(?s)`WeightedCell` was .*`input_size` is -1"):
            nn.WeightedCell(-1, nn.LIFCell(3, 0.9), key=key)

    @pytest.mark.parametrize(
        ("cell", "where"),
        [(3, "`cell` is 3"), (nn.LIFCell((2, 3), 0.9), r"of its neurons is \(2, 3\)")],
    )
    def test_input_weights_of_another_cell(self, cell, where, getkey):
        with pytest.raises(RuleError, match=f"than a spiking cell of a vector(?s:.)*{where}"):
            nn.WeightedCell(2, cell, key=getkey())

    def test_no_key(self):
        layers = {"LIF": (0.9,), "ALIF": (0.9, 0.8), "CuBaLIF": (0.5, 0.9), "LI": (0.9,)}
        xs = jnp.ones((5, 4))
        for name, decays in layers.items():
            make = ft.partial(getattr(nn, name), 4, 4, *decays)
            options = {"use_input_weight": False, "num_layers": 2}
            layer = make(**options, learn_beta=True, learn_initial_state=True)
            with_key = make(**options, learn_beta=True, learn_initial_state=True, key=jr.key(1))
            assert eqx.tree_equal(layer, with_key)
            assert layer(xs)[0].shape == (5, 4)
            with pytest.raises(RuleError, match=f"`{name}` was given no random key, and has"):
                make()

    def test_no_input_weights(self, getkey):
        options = {"use_input_weight": False, "key": getkey()}
        expected = r"`LIF` without input weights(?s:.)*are {} inputs and 4 neurons"
        with pytest.raises(RuleError, match=expected.format(3)):
            nn.LIF(3, 4, 0.9, **options)
        with pytest.raises(RuleError, match=expected.format(8)):
            nn.LIF(4, 4, 0.9, num_layers=2, bidirectional=True, **options)
        layer = nn.LIF(4, 4, 0.9, **options)
        with pytest.raises(RuleError, match=r"inputs of the wrong size(?s:.)*are 4 neurons"):
            layer(jnp.ones((5, 3)))

    def test_cells(self, getkey):
        with pytest.raises(RuleError, match=r"(?s)`LIF.from_cell`.*a `LICell`, and has to be"):
            nn.LIF.from_cell(nn.LICell(3, 0.9))
        with pytest.raises(RuleError, match=r"(?s)`RLIF.from_cell`.*it is a `LIFCell`"):
            nn.RLIF.from_cell(nn.WeightedCell(3, nn.LIFCell(4, 0.9), key=getkey()))
        with pytest.raises(RuleError, match=r"(?s)not a vector.*`hidden_size` is \(2, 3\)"):
            nn.LIF.from_cell(nn.LIFCell((2, 3), 0.9))
        with pytest.raises(RuleError, match="was asked for one of 2 cells"):
            nn.LI(3, 4, 0.9, num_layers=2, key=getkey()).to_cell()

    def test_inputs(self, getkey):
        layer = nn.LIF(3, 4, 0.9, key=getkey())
        with pytest.raises(RuleError, match="`LIF` was given inputs of the wrong size"):
            layer(jnp.ones((5, 4)))
        with pytest.raises(RuleError, match=r"(?s)not of real numbers.*`xs` is complex64"):
            layer(jnp.ones((5, 3), "complex64"))
        with pytest.raises(RuleError, match="`LIF` was given a `state` that does not fit"):
            layer(jnp.ones((5, 3)), jnp.zeros(4))
