"""Recurrent layers, against plain scans of the textbook's cells."""

import functools as ft
import operator

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry
from .over_time import CHEAP, draws, enter, layer, plain


# A line has as many arguments as there is room for.
# fmt: off
nn = eqg.nn
normal = draws(0)


# ---------------------------------------------------------------- the textbook's cells


def gru_step(c, x, h):
    r, z, n = jnp.split(c["weight_ih"] @ x + c.get("bias", 0), 3)
    h_r, h_z, h_n = jnp.split(c["weight_hh"] @ h, 3)
    r, z = jax.nn.sigmoid(r + h_r), jax.nn.sigmoid(z + h_z)
    n = jnp.tanh(n + r * (h_n + c.get("bias_n", 0)))
    h = (1 - z) * n + z * h
    return h, h


def lstm_step(c, x, state):
    h, cell = state
    i, f, g, o = jnp.split(c["weight_ih"] @ x + c["weight_hh"] @ h + c.get("bias", 0), 4)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(cell)
    h = c["weight_hr"] @ h if "weight_hr" in c else h
    return (h, cell), h


def rnn_step(phi, c, x, h):
    h = phi(c["weight_ih"] @ x + c["weight_hh"] @ h + c.get("bias", 0))
    return h, h


zero_hidden = lambda c: jnp.zeros(c["weight_hh"].shape[1], c["weight_hh"].dtype)


def zero_pair(c):
    h = zero_hidden(c)
    return h, jnp.zeros(len(c["weight_hh"]) // 4, h.dtype)


KINDS = {
    "GRU": (nn.GRU, 3, gru_step, zero_hidden), "LSTM": (nn.LSTM, 4, lstm_step, zero_pair),
    "RNN": (nn.RNN, 1, ft.partial(rnn_step, jnp.tanh), zero_hidden),
}
relu = ft.partial(rnn_step, jax.nn.relu)
KINDS["RNN, relu"] = (ft.partial(nn.RNN, activation="relu"), 1, relu, zero_hidden)


def cells_of(kind, sizes, hidden, proj=None, directions=1, bias=True):
    """Weights of all layers and directions: `sizes` are the input sizes of the layers."""
    gates, scale = KINDS[kind][1], hidden**-0.5

    def one(size):
        c = {
            "weight_ih": normal(gates * hidden, size, scale=size**-0.5),
            "weight_hh": normal(gates * hidden, proj or hidden, scale=scale),
        }
        if proj is not None:
            c["weight_hr"] = normal(proj, hidden, scale=2 * scale)
        if bias:
            c["bias"] = normal(gates * hidden, scale=0.5)
            if kind == "GRU":
                c["bias_n"] = normal(hidden, scale=0.5)
        return c

    return tuple(tuple(one(size) for _ in range(directions)) for size in sizes)


def states_of(kind, *shape, proj=None):
    """`shape` ends in the hidden size."""
    if kind != "LSTM":
        return normal(*shape, scale=0.7)
    return normal(*shape[:-1], proj or shape[-1], scale=0.7), normal(*shape)


def recurrent(
    name, kind, xs, hidden, *, lengths=None, state=None, key=None, half=None, options=CHEAP,
    **given,
):
    make, _, step, zero = KINDS[kind]
    layers, directions = given.get("num_layers", 1), 1 + given.get("bidirectional", False)
    proj, n = given.get("proj_size"), layers * directions
    sizes = [xs.shape[-1], *(layers - 1) * [directions * (proj or hidden)]]
    cells = cells_of(kind, sizes, hidden, proj, directions, given.get("use_bias", True))
    state, first = None if state is None else states_of(kind, *state, hidden, proj=proj), None
    if given.get("learn_initial_state"):
        first = states_of(kind, *((n,) if n > 1 else ()), hidden, proj=proj)
    time = {name: given[name] for name in ("reverse", "time_major", "dropout") if name in given}
    options = {**options, "half": None if half is None else (half, cells)}
    args = (xs, cells, state, lengths, first, key)
    fn = layer(ft.partial(make, xs.shape[-1], hidden), **given)
    options |= {"plain": plain(step, zero, **time)}
    enter(name, fn, *args, time_major=time.get("time_major", False), **options)


# ---------------------------------------------------------------- entries

# One sequence, with a state and biases. All rules are of one form: the orders that are left out
# for the others tell apart what they have in common.
SOME = {"orders": ("value", "jvp", "vjp", "RR"), "costs": False}
AGAIN = {**CHEAP, "orders": SOME["orders"]}
recurrent("nn.GRU", "GRU", normal(5, 2), 3, state=(), options={})
recurrent("nn.LSTM", "LSTM", normal(5, 2), 3, state=(), options=SOME)
recurrent("nn.LSTM: projected", "LSTM", normal(5, 2), 3, proj_size=2, state=(), options=AGAIN)
recurrent("nn.RNN", "RNN", normal(5, 2), 3, state=(), options=SOME)

# Padded batches. The states differ for each of the cells.
PADDED = {"lengths": np.array([5, 2, 0])}
recurrent("nn.GRU: stacked", "GRU", normal(3, 5, 2), 3, state=(4, 3), num_layers=2,
    bidirectional=True, **PADDED)
recurrent("nn.LSTM: stacked, time major", "LSTM", normal(5, 3, 2), 3, num_layers=2,
    learn_initial_state=True, reverse=True, time_major=True, keep="states", **PADDED)
recurrent("nn.LSTM: projected, stacked", "LSTM", normal(3, 5, 2), 3, proj_size=2, num_layers=2,
    **PADDED)
recurrent("nn.RNN: two directions", "RNN, relu", normal(3, 5, 1), 3, bidirectional=True,
    use_bias=False, **PADDED)
recurrent("nn.GRU: without biases", "GRU", normal(5, 1), 3, use_bias=False, keep="states")
recurrent("nn.LSTM: without biases", "LSTM", normal(5, 1), 3, use_bias=False,
    learn_initial_state=True)
KEY = np.array([3, 5], np.uint32)
for name, key in (("with a key", KEY), ("in inference", None)):
    recurrent(f"nn.RNN: dropout {name}", "RNN", normal(5, 2), 3, num_layers=2, dropout=0.3,
        key=key)
recurrent("nn.LSTM: vmap of batches", "LSTM", normal(2, 3, 5, 2), 3, state=(2, 3),
    lengths=np.array([[5, 2, 0], [1, 3, 4]]))

# Three chunks of the backward pass, of 16, 16 and 15 steps.
LENGTHS = np.array([47, 0, 1, 15, 16, 17, 31, 32, 33, 40, 46])
for kind, keep in (("GRU", "gates"), ("LSTM", "gates"), ("RNN", None)):
    chunked = {"state": (11,), "time_major": True} | ({"keep": keep} if keep else {})
    recurrent(f"nn.{kind}: chunks", kind, normal(47, 11, 2), 17, **chunked)
for kind, keep in (("GRU", "states"), ("LSTM", "states"), ("RNN", None)):
    padded = {"reverse": True, "lengths": LENGTHS, "state": (11,)}
    padded |= {"keep": keep} if keep else {}
    recurrent(f"nn.{kind}: padded chunks", kind, normal(11, 47, 2), 17, **padded)
recurrent("nn.LSTM: projected, chunks", "LSTM", normal(11, 47, 2), 17, proj_size=3,
    reverse=True, lengths=LENGTHS, state=(11,))
# Three chunks of the forward pass: few examples, and wide inputs.
for kind, reverse in (("GRU", True), ("LSTM", False), ("RNN", True)):
    wide = {"state": (), "reverse": reverse}
    recurrent(f"nn.{kind}: forward chunks", kind, normal(191, 41), 53, **wide)


# Thirty-two chunks: the backward pass begins with a large gradient, to which each other chunk
# adds less than half precision tells apart. All together are several of its last digits.
def long_inputs():
    xs = np.abs(normal(509, 17, 2)) + 0.5
    xs[:-13] *= 0.0012
    return xs


recurrent("nn.GRU: long sums", "GRU", normal(3, 2, 2), 3, time_major=True, use_bias=False,
    half=long_inputs())


# ---------------------------------------------------------------- of cells


def of_cell(kind, reverse, **options):
    def make(key, dtype):
        cell = getattr(nn, kind)(2, 3, key=key, dtype=dtype).cells[0][0]
        return nn.Recurrent(cell, reverse=reverse, learn_initial_state=True, **options)

    args = (normal(5, 2), cells_of(kind, [2], 3), None, None, states_of(kind, 3))
    reference = plain(*KINDS[kind][2:], reverse=reverse)
    entry(f"nn.Recurrent: a cell of {kind}", layer(make), *args, plain=reference, **CHEAP)


for kind, reverse in (("GRU", True), ("LSTM", False), ("RNN", True)):
    of_cell(kind, reverse)


def one_cell(make, x, state, arrays):
    cell = make(dtype=x.dtype, key=jr.key(0))
    for name, array in arrays.items():
        cell = eqx.tree_at(operator.attrgetter(name), cell, array)
    return cell(x, state)


entry("nn.RNNCell", ft.partial(one_cell, ft.partial(nn.RNNCell, 2, 3, activation="relu")),
    normal(2), normal(3), cells_of("RNN", [2], 3)[0][0],
    plain=lambda x, h, c: rnn_step(jax.nn.relu, c, x, h)[1], **CHEAP)


class Oscillator(eqx.Module):
    """Two states, of different shapes."""

    decay: jax.Array
    weight: jax.Array

    def __call__(self, x, state):
        fast = self.decay * state["fast"] + self.weight @ x
        return {"fast": fast, "slow": 0.7 * state["slow"] + jnp.sin(jnp.sum(fast))}

    def initial_state(self):
        dtype = self.decay.dtype
        return {"fast": jnp.full(3, 0.3, dtype), "slow": jnp.full((), 0.6, dtype)}


def any_cell(output, checkpoint, **options):
    def fn(xs, cell, state, lengths, first):
        more = {"output": output, "checkpoint": checkpoint, **options}
        made = nn.Recurrent(Oscillator(**cell), initial_state=first, **more)
        return made(xs, state, lengths=lengths)

    def step(cell, x, state):
        new = Oscillator(**cell)(x, state)
        return new, new["fast"] if output is None else output(new)

    def reference(xs, cell, state, lengths, first):
        run = plain(step, lambda cell: Oscillator(**cell).initial_state(), **options)
        return run(xs, ((cell,),), state, lengths, first)

    return fn, reference


two_states = lambda *batch: {"fast": normal(*batch, 3), "slow": normal(*batch)}
OSCILLATOR = {"decay": np.array([0.4, -0.7, 0.9]), "weight": normal(3, 2)}
mixed = lambda state: state["fast"] * state["slow"]
fn, reference = any_cell(mixed, "replay", reverse=True)
args = normal(7, 2), OSCILLATOR, None, None, two_states()
entry("nn.Recurrent", fn, *args, plain=reference, **AGAIN)
for checkpoint, state in ((None, None), (3, two_states(2)), ("sqrt", two_states(2))):
    fn, reference = any_cell(None, checkpoint, time_major=True)
    args = normal(7, 2, 2), OSCILLATOR, state, np.array([7, 4]), None
    options = {**CHEAP, "time_major": True, "plain": reference}
    enter(f"nn.Recurrent: checkpoint={checkpoint}", fn, *args, **options)


def outputs(last, reverse, xs, cells):
    options = {"bidirectional": True, "reverse": reverse, "time_major": xs.ndim == 3}
    make = ft.partial(nn.RNN, 2, 3, **options)
    calls = lambda made, xs: nn.Outputs(made, last=last)(xs)
    return layer(make, calls=calls)(xs, cells)


def outputs_plain(last, reverse, xs, cells):
    run = plain(KINDS["RNN"][2], zero_hidden, reverse=reverse, time_major=True)
    ys, ends = run(xs, cells)
    return jnp.concatenate([ends[0], ends[1]], -1) if last else ys


for last, reverse, shape in (
    (True, True, (5, 3, 2)), (True, False, (5, 2)), (False, True, (5, 2)),
):
    two = cells_of("RNN", [2], 3, directions=2)
    options = {**CHEAP, "plain": ft.partial(outputs_plain, last, reverse)}
    name = f"nn.Outputs: {last=}, {reverse=}"
    entry(name, ft.partial(outputs, last, reverse), normal(*shape), two, **options)
for kind, given, state in (
    ("GRU", {}, normal(3)), ("LSTM", {}, (normal(3), normal(3))),
    ("LSTM", {"proj_size": 2}, (normal(2), normal(3))),
):
    make = lambda kind=kind, **given: getattr(nn, kind)(2, 3, **given).cells[0][0]
    entry(f"nn.{kind}: a cell, {given}", ft.partial(one_cell, ft.partial(make, **given)),
        normal(2), state, cells_of(kind, [2], 3, given.get("proj_size"))[0][0],
        plain=lambda x, state, c, step=KINDS[kind][2]: step(c, x, state)[0], **CHEAP)
