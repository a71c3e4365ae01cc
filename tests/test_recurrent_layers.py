"""Recurrent layers against their cells in a loop written out, and autodiff of it.

Written out, as XLA 0.10.2 for CPUs gets the gradient of `jax.lax.scan` of `eqx.nn.GRUCell`
wrong in double precision for some odd sizes (its fusion emitters; hidden size 5, batch 4):
https://github.com/jax-ml/jax/issues/39103. With JAX 0.11 as the oldest version, scan.
"""

import functools as ft

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads import RuleError
from eqx_grads._jaxprs.structure import equations, holds, inner_programs, Scan, structure
from eqx_grads.nn._recurrent import split_scan as rule

from .helpers import assert_close, checking_leaks
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


@pytest.fixture(params=["at once", "step by step"])
def chunks(monkeypatch, request):
    """Chunks of two steps: five steps are two full and a short one. What a large and a small
    batch compute for a chunk at once or step by step is chosen here."""
    at_once = request.param == "at once"
    of_two = lambda xs, hidden: min(2, xs.shape[0])
    monkeypatch.setattr(rule, "chunk_length", of_two)
    monkeypatch.setattr(rule, "forward_chunk", of_two if at_once else lambda *_: None)
    monkeypatch.setattr(rule, "is_small", lambda h: at_once)


def make(getkey, name, *, dtype="float64", steps=5, batch=2, **options):
    layer = LAYERS[name](3, 4, dtype=dtype, key=getkey(), **options)
    xs = jr.normal(getkey(), (batch, steps, 3), dtype)
    _, state = layer(xs)
    state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape, dtype), state)
    return layer, xs, state


@pytest.mark.slow
@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", LAYERS)
def test_gradient_of_one_output(name, getkey):
    with jax.enable_x64(True):
        args = make(getkey, name)
        gradients = lambda run: eqx.filter_jit(
            lambda args: [eqx.filter_grad(loss)(args) for loss in losses_of_one_output(run)]
        )
        got = gradients(lambda layer, xs, state: layer(xs, state))(args)
        assert_close(got, gradients(reference)(args), tolerance=1e-10)


@pytest.mark.usefixtures("chunks")
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_stacked_bidirectional_and_padded(name, getkey):
    with jax.enable_x64(True):
        args = make(getkey, name, num_layers=2, bidirectional=True)
        lengths = [5, 2]
        run = lambda layer, xs, state: layer(xs, state, lengths=lengths)
        plain = ft.partial(reference, lengths=lengths)
        assert_close(run(*args), plain(*args), tolerance=1e-10)
        got = eqx.filter_grad(loss(run))(args)
        assert_close(got, eqx.filter_grad(loss(plain))(args), tolerance=1e-10)
        # Padding is never looked at.
        layer, xs, state = args
        spoiled = (layer, xs.at[1, 2:].set(jnp.nan), state)
        assert_close(run(*spoiled), run(*args), tolerance=1e-10)
        assert_close(eqx.filter_grad(loss(run))(spoiled), got, tolerance=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_for_each_example_and_networks_for_each(name, getkey):
    layer, xs, state = make(getkey, name, dtype="float32", steps=3)
    grad = eqx.filter_grad(loss(lambda layer, x, s: layer(x, s)))
    get = lambda b: grad((layer, xs[b], jax.tree.map(lambda s: s[b], state)))
    per_example = eqx.filter_vmap(lambda x, s: grad((layer, x, s)))(xs, state)
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), get(0), get(1))
    assert_close(per_example, stacked, tolerance=1e-5)

    arrays, static = eqx.partition(layer, eqx.is_array)
    ensemble = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), arrays)
    of_one = lambda arrays: grad((eqx.combine(arrays, static), xs, state))
    twice = jax.tree.map(lambda w: 2 * w, arrays)
    expected = jax.tree.map(lambda a, b: jnp.stack([a, b]), of_one(arrays), of_one(twice))
    assert_close(jax.vmap(of_one)(ensemble), expected, tolerance=1e-5)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_one_weight_gradient_for_the_batch(name, getkey):
    layer, xs, _ = make(getkey, name, dtype="float32", batch=7)
    total = lambda layer: jnp.sum(jax.vmap(layer)(xs)[0])
    jaxpr = str(jax.make_jaxpr(eqx.filter_grad(total))(layer))
    assert f"[7,{layer.cells[0][0].weight_hh.shape[0]}," not in jaxpr


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("sizes", [(0, 5), (0, 1), (5, 0), (0, 0)])
def test_vmap_of_no_examples(name, sizes, getkey):
    """The witness of the shapes is a batch of one example, and of one in it."""
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


def plain_scan(cell, xs, zero):
    def step(state, x):
        state = jax.vmap(cell)(x, state)
        return state, jax.tree.leaves(state)[0]

    return jax.lax.scan(step, zero, xs)[1]


def temp_bytes(run, *args):
    total = lambda args: jnp.sum(jnp.sin(run(*args)))
    compiled = jax.jit(jax.grad(total)).lower(args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.cost
@pytest.mark.parametrize(
    ("make_layer", "gates", "states"), [(nn.GRU, 0.7, 0.33), (nn.LSTM, 0.65, 0.4)]
)
def test_memory(make_layer, gates, states, getkey):
    layer = make_layer(16, 32, time_major=True, key=getkey())
    xs = jnp.ones((256, 16, 16))
    zero = jax.tree.map(jnp.zeros_like, layer(xs)[1])
    plain = temp_bytes(lambda cell, xs: plain_scan(cell, xs, zero), layer.cells[0][0], xs)
    for keep, bound in (("gates", gates), ("states", states)):
        checkpoint = {"gates": None, "states": "replay"}[keep]
        run = lambda cell, xs, c=checkpoint: nn.Recurrent(cell, checkpoint=c, time_major=True)(
            xs
        )[0]
        assert temp_bytes(run, layer.cells[0][0], xs) < bound * plain


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


def cast(tree, dtype):
    return jax.tree.map(lambda w: w.astype(dtype) if eqx.is_array(w) else w, tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GRU, gates", "LSTM, gates", "RNN, tanh"])
def test_half_precision(name, getkey):
    layer, xs, _ = make(getkey, name, dtype="float32", steps=40, batch=8)
    half = cast(layer, "bfloat16")
    single = cast(half, "float32")
    grad = eqx.filter_grad(lambda layer, xs: jnp.sum(layer(xs)[0] ** 2))
    # Inputs in single precision: all is computed in it, and cast at the end.
    expected = cast(grad(single, xs), "bfloat16")
    assert_close(grad(half, xs), expected, tolerance=0.0)
    assert half(xs.astype("bfloat16"))[0].dtype == "bfloat16"
    for got, want in zip(
        jax.tree.leaves(grad(half, xs.astype("bfloat16"))),
        jax.tree.leaves(expected),
        strict=True,
    ):
        scale = jnp.max(jnp.abs(want)).astype("float32")
        assert jnp.max(jnp.abs((got - want).astype("float32"))) < 0.05 * scale


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


@pytest.mark.thorough
def test_no_step_in_stacks_and_of_any_cell(getkey):
    stack = nn.LSTM(3, 4, num_layers=2, bidirectional=True, key=getkey())
    any_cell = nn.Recurrent(eqx.nn.GRUCell(3, 4, key=getkey()))
    for layer, out, shape in ((stack, 8, (4, 2, 4)), (any_cell, 4, (2, 4))):
        state = jax.tree.map(
            lambda _, shape=shape: jr.normal(getkey(), shape), layer(jnp.ones((2, 0, 3)))[1]
        )
        for lengths in (None, [0, 0]):
            ys, end = layer(jnp.zeros((2, 0, 3)), state, lengths=lengths)
            assert ys.shape == (2, 0, out)
            assert_close(end, state, tolerance=1e-10)


@pytest.mark.slow
def test_no_example(getkey):
    any_cell = nn.Recurrent(eqx.nn.GRUCell(3, 4, key=getkey()))
    for layer in (nn.GRU(3, 4, key=getkey()), nn.LSTM(3, 4, key=getkey()), any_cell):
        xs = jnp.ones((0, 5, 3))
        assert layer(xs)[0].shape == (0, 5, 4)
        grads = eqx.filter_grad(lambda layer, xs=xs: jnp.sum(layer(xs)[0]))(layer)
        assert all(jnp.all(g == 0) for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_outputs_of_any_shape(getkey):
    """A number, a matrix, a tree; and what is past the end of each is zero."""
    running = nn.Recurrent(
        lambda x, s: s + x,
        initial_state=jnp.zeros(3),
        output=lambda s: (jnp.sum(s), jnp.outer(s, s)),
    )
    xs = jr.normal(getkey(), (4, 5, 3))
    total, outer = running(xs, lengths=[5, 2, 0, 4])[0]
    sums = jnp.cumsum(xs, 1)
    valid = jnp.arange(5)[None] < jnp.array([5, 2, 0, 4])[:, None]
    assert_close(total, jnp.where(valid, jnp.sum(sums, 2), 0), tolerance=1e-5)
    products = sums[..., :, None] * sums[..., None, :]
    assert_close(outer, jnp.where(valid[..., None, None], products, 0), tolerance=1e-5)
    alone = running(xs[1], lengths=2)[0]
    assert_close(alone, (total[1], outer[1]), tolerance=1e-6)


def test_a_cell_of_half_precision_with_wider_inputs(getkey):
    cell = eqx.nn.GRUCell(3, 4, dtype=jnp.bfloat16, key=getkey())
    xs = jnp.ones((2, 5, 3), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        ys, state = nn.Recurrent(cell)(xs)
    assert ys.dtype == state.dtype == jnp.float32


@pytest.mark.thorough
def test_layouts(getkey):
    layer, xs, state = make(getkey, "LSTM, gates", dtype="float32")
    time_major = nn.Recurrent(layer.cells[0][0], time_major=True)
    ys, end = time_major(jnp.swapaxes(xs, 0, 1), state)
    assert_close((jnp.swapaxes(ys, 0, 1), end), layer(xs, state), tolerance=1e-10)
    one = layer(xs[0], jax.tree.map(lambda s: s[0], state))
    assert_close(one, jax.tree.map(lambda y: y[0], layer(xs, state)), tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "cell"), [(nn.GRU, eqx.nn.GRUCell), (nn.LSTM, eqx.nn.LSTMCell)]
)
def test_one_input_column(layer, cell, getkey):
    """The gradient of its weight is a matrix product of its own."""
    cell = cell(1, 4, key=getkey())
    xs = jr.normal(getkey(), (3, 5, 1))

    def plain(cell, xs):
        h = jnp.zeros(4)
        is_lstm = isinstance(cell, eqx.nn.LSTMCell)
        step = lambda s, x: ((new := cell(x, s)), new[0] if is_lstm else new)
        return jax.lax.scan(step, (h, h) if is_lstm else h, xs)[1]

    total = lambda run: jnp.sum(jnp.sin(run))
    expected = eqx.filter_grad(lambda c: total(jax.vmap(ft.partial(plain, c))(xs)))(cell)
    grad = eqx.filter_grad(lambda c: total(nn.Recurrent(c)(xs)[0]))(cell)
    assert_close(grad.weight_ih, expected.weight_ih)


@pytest.mark.slow
def test_learned_initial_state_and_dropout(getkey):
    layer = nn.GRU(
        3, 4, num_layers=2, dropout=0.5, learn_initial_state=True, key=getkey(), use_bias=False
    )
    xs = jr.normal(getkey(), (2, 5, 3))
    total = lambda layer, key: jnp.sum(layer(xs, key=key)[0])
    key = getkey()
    grad = eqx.filter_grad(total)(layer, key)
    assert grad.initial_state.shape == (2, 4)
    assert jnp.all(grad.initial_state != 0)
    assert total(layer, key) == total(layer, key) != total(layer, getkey())
    quiet = eqx.nn.inference_mode(layer)
    assert total(quiet, None) == jnp.sum(layer(xs, inference=True)[0])
    with pytest.raises(RuleError, match="A call of `GRU` with dropout was given no random key"):
        layer(xs)


class Attend(eqx.Module):
    """A cell with a matrix, a vector and a counter for a state."""

    query: jax.Array

    def __call__(self, x, state):
        memory, count, h = state
        memory = 0.9 * memory + jnp.outer(h, x)
        return memory, count + 1, jnp.tanh(jax.nn.softmax(memory @ self.query) + h)


def test_state_of_the_call_alone(getkey):
    """The layer does not know the first state of this cell, and need not."""
    xs, query = jr.normal(getkey(), (2, 5, 3)), jr.normal(getkey(), (3,))
    state = (jnp.ones((2, 3, 3)), jnp.zeros(2), jnp.ones((2, 3)))

    def by_scan(query, xs, state):
        def step(state, x):
            state = Attend(query)(x, state)
            return state, state[2]

        return jax.lax.scan(step, state, xs)[1]

    def expected(query):
        return jax.vmap(by_scan, (None, 0, 0))(query, xs, state)

    def layer(query):
        return nn.Recurrent(Attend(query), output=lambda state: state[2])(xs, state)[0]

    assert_close(layer(query), expected(query), tolerance=2e-6)
    gradient = lambda fn: jax.grad(lambda q: jnp.sum(fn(q) ** 2))(query)
    assert_close(gradient(layer), gradient(expected), tolerance=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [None, 2, "auto"])
def test_any_cell(checkpoint, getkey):
    cell = Attend(jr.normal(getkey(), (3,)))
    state = (jnp.zeros((4, 3)), jnp.array(0), jnp.ones(4))
    layer = nn.Recurrent(
        cell, initial_state=state, output=lambda s: s[2], checkpoint=checkpoint
    )
    xs = jr.normal(getkey(), (2, 5, 3))

    def plain(cell, xs, lengths):
        total = jnp.zeros(())
        for x, n in zip(xs, lengths, strict=True):
            s = state
            for t in range(n):
                s = cell(x[t], s)
                total = total + jnp.sum(s[2] ** 2)
        return total

    def run(cell, xs, lengths):
        layer_ = eqx.tree_at(lambda layer: layer.cells, layer, ((cell,),))
        ys, (_, count, _) = layer_(xs, lengths=lengths)
        assert count.shape == (2,)
        return jnp.sum(ys**2)

    grad = lambda f: eqx.filter_grad(lambda args, n: f(*args, n))
    assert_close(grad(run)((cell, xs), [5, 3]), grad(plain)((cell, xs), [5, 3]), tolerance=2e-5)
    assert layer(xs[0], lengths=3)[1][1] == 3
    with checking_leaks():
        eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(layer(xs)[0])))(layer)


class LayerNormLSTM(eqx.Module):
    """As in the guide about fast recurrent networks."""

    weights: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    norm_c: eqx.nn.LayerNorm

    def __init__(self, input_size, hidden_size, *, key):
        self.weights = eqx.nn.Linear(input_size + hidden_size, 4 * hidden_size, key=key)
        self.norm = eqx.nn.LayerNorm(4 * hidden_size)
        self.norm_c = eqx.nn.LayerNorm(hidden_size)

    def __call__(self, x, state):
        h, c = state
        i, f, g, o = jnp.split(self.norm(self.weights(jnp.concatenate([x, h]))), 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(self.norm_c(c)), c

    def initial_state(self):
        return jnp.zeros(self.norm_c.shape), jnp.zeros(self.norm_c.shape)


@pytest.mark.thorough
@pytest.mark.parametrize("reverse", [False, True])
def test_a_cell_of_your_own_has_all_options(reverse, getkey):
    make = lambda size: LayerNormLSTM(size, 2, key=getkey())
    layer = nn.Recurrent(
        [(make(3), make(3)), (make(4), make(4))],
        dropout=0.5,
        learn_initial_state=True,
        reverse=reverse,
        time_major=True,
    )
    assert jax.tree.map(jnp.shape, layer.initial_state) == ((4, 2), (4, 2))
    xs, lengths = jr.normal(getkey(), (2, 4, 3)), [4, 2]

    def run(layer, xs, _):
        xs = jnp.swapaxes(xs, 0, 1)
        ys, last = layer(xs, lengths=lengths, inference=True)
        return jnp.swapaxes(ys, 0, 1), last

    def plain(layer, xs, _):
        state = jax.tree.map(lambda s: jnp.repeat(s[:, None], 2, 1), layer.initial_state)
        return reference(layer, xs, state, lengths)

    both = lambda f: eqx.filter_jit(lambda a: (f(*a), eqx.filter_grad(loss(f))(a)))
    assert_close(both(run)((layer, xs, None)), both(plain)((layer, xs, None)), tolerance=2e-5)
    dropped = [layer(jnp.swapaxes(xs, 0, 1), key=getkey())[0] for _ in range(2)]
    assert jnp.any(dropped[0] != dropped[1])


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
    """It may have another step than the fast path, which is that of `GRUCell` only."""
    layer = nn.Recurrent(Halving(3, 4, key=getkey()))
    assert jnp.all(layer(jnp.ones((5, 3)), jnp.ones(4))[0][-1] == 2**-5)


# ---------------------------------------------------------------- errors

XS = jnp.ones((2, 5, 3), "float32")
KEY = jr.key(0)
CELL = eqx.nn.GRUCell(3, 4, dtype="float32", key=KEY)
GRU = nn.GRU(3, 5, dtype="float32", key=KEY)
ONE = nn.GRU(1, 4, dtype="float32", key=KEY)
LSTM = nn.LSTM(3, 4, dtype="float32", key=KEY)
ADD = nn.Recurrent(lambda x, h: h + x)
GROW = nn.Recurrent(lambda x, h: jnp.append(h, x), initial_state=jnp.ones(3, "float32"))
ON = jnp.arange(5)[None] < jnp.array([[2], [3]])
LENGTHS, BY_NAME = jnp.array([2, 3]), r"does not fit(?s:.)*`layer\(xs, lengths=lengths\)`"
KEY_BY_NAME = r"(?s)`state`.*`layer\(xs, key=key\)`"
# What `lengths` are, and what to do.
LENGTHS_ARE = (
    r"`lengths` is {}\n  `xs` is a batch of 2 sequences of 5 steps\nPass integers of {}"
)
ONE_INTEGER = r"do not fit `xs`(?s:.)*one sequence of 5 steps\nPass one integer.*`jax\.vmap\("
LSTM_STATE = r"its shape is \(\(2, 5\), \(2, 4\)\), and has to be \(\(2, 4\), \(2, 4\)\)"
ERRORS = [
    (lambda: nn.GRU(3, 4, keep="all", key=KEY), "(?s)`keep` is 'all'.*'states'"),
    (lambda: nn.LSTM(0, 4, key=KEY), "(?s)not a positive integer.*`input_size` is 0"),
    (lambda: nn.LSTM(3, -1, key=KEY), r"`LSTM` was given a size(?s:.)*`hidden_size` is -1"),
    (lambda: nn.GRU(3, 4, num_layers=0, key=KEY), "`num_layers` is 0"),
    (lambda: nn.RNN(3, 4, activation="gelu", key=KEY), "`activation` is 'gelu'"),
    # Inputs
    (
        lambda: nn.Recurrent(CELL)(XS[..., :2]),
        r"`Recurrent` was given inputs of the wrong size",
    ),
    (lambda: GRU(XS[0, :, :2]), r"`GRU` was .* wrong size\.(?s:.)*32\[2\].*`input_size` is 3"),
    (lambda: GRU(XS[:, :0, :2]), r"a step of `xs` is float32\[2\], and `input_size`"),
    (lambda: GRU(XS[None]), "`GRU` was given `xs` with 4 axes"),
    (
        lambda: GRU(XS[0, 0]),
        r"`xs` with 1 axes(?s:.)*vmap.*a sequence of numbers `xs\[:, None\]`",
    ),
    (lambda: ONE(XS[0]), r"A sequence of numbers is `xs\[\.\.\., None\]`"),
    # States
    (lambda: LSTM(XS, (jnp.ones((2, 5)), jnp.ones((2, 4)))), LSTM_STATE),
    (lambda: LSTM(XS[0], jnp.ones(4)), r"its shape is \(4,\), and has to be \(\(4,\), \("),
    (lambda: LSTM(XS, 2 * (jnp.ones(4),)), "5 steps\n.*a state for each example"),
    (lambda: ADD(XS), "does not know the first state of its cell"),
    (lambda: ADD(XS, jnp.ones(3)), r"is \(3,\), without an axis of size 2 for the batch\n"),
    (lambda: GROW(XS), r"another state(?s:.)*32\[3\](?s:.)*32\[6\]"),
    # In the shape of the state, this was taken for zeros and ones.
    (lambda: GRU(XS, ON), r"bool\[2,5\], as masks are(?s:.)*lengths="),
    (lambda: GRU(XS, KEY), KEY_BY_NAME),
    (lambda: GRU(XS, jr.PRNGKey(0)), KEY_BY_NAME),
    (lambda: GRU(XS[0], 2), BY_NAME),
    (lambda: jax.vmap(GRU)(XS, LENGTHS), BY_NAME),
    *((lambda s=s: GRU(XS, s), BY_NAME) for s in (LENGTHS, [2, 2], jnp.ones(5))),
    # Lengths
    (lambda: GRU(XS, lengths=[2, 6]), "from 2 to 6\n.* 2 sequences of 5 steps\n.*time_major"),
    (lambda: GRU(XS, lengths=[-1, 5]), "from -1 to 5\n"),
    (lambda: GRU(XS[:, :0], lengths=[0, 1]), "from 0 to 1\n.*of 0 steps"),
    (lambda: GRU(XS[0], lengths=[1]), ONE_INTEGER),
    (lambda: jax.vmap(lambda x: GRU(x, lengths=LENGTHS))(XS), ONE_INTEGER),
    (lambda: GRU(XS, lengths=3), LENGTHS_ARE.format(r"int..\[\]", r"shape \(2,\)")),
    (lambda: GRU(XS, lengths=[1, 2, 3]), LENGTHS_ARE.format(r"int..\[3\]", "shape")),
    (lambda: GRU(XS, lengths=[1] * 5), LENGTHS_ARE.format(r"int..\[5\]", ".*Did you swap")),
    (lambda: GRU(XS, lengths=ON), LENGTHS_ARE.format(r"bool\[2,5\]", r".*`mask\.sum\(-1\)`")),
]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("i", range(len(ERRORS)))
def test_errors(i):
    call, expected = ERRORS[i]
    with pytest.raises(RuleError, match=expected):
        call()


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
