"""The advice of `explain_memory`: on logits, on loops over cells, on layers and on replays.

Sizes are those of the arrays of the loss, counted by hand. A name of an argument is part of a
call that the advice says to write.
"""

import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax


def explain(loss, *args):
    return eqg.explain_memory(loss, *args, compiled=False)


# ---------------------------------------------------------------- logits

TOKENS, WIDTH, WORDS = (4, 12), 8, 96
LABELS = jnp.zeros(TOKENS, int)
MASK = np.zeros(TOKENS, "float32")
MASK[:, 5:] = 1.0
MODEL = {"w": jnp.ones((WORDS, WIDTH)), "b": jnp.ones(WORDS)}
X = jnp.ones((*TOKENS, WIDTH))


def logits(m, x):
    return x @ m["w"].T + m["b"][None, None]


def of_labels(z, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], -1)[..., 0]


def one_hot(z, labels):
    return -jnp.sum(jax.nn.one_hot(labels, z.shape[-1]) * jax.nn.log_softmax(z), -1)


def mean_loss(of_tokens=jnp.mean, z=logits, losses=of_labels):
    return lambda m, x, labels: of_tokens(losses(z(m, x), labels))


W_AND_B, NONE = "x, model['w'], labels, bias=model['b']", ', reduction="none"'
# A loss, and the arguments of the call that replaces the logits. Empty: it is another loss.
LOGITS = {
    "mean": (mean_loss(), W_AND_B), "one-hot": (mean_loss(losses=one_hot), W_AND_B),
    "no bias": (mean_loss(z=lambda m, x: x @ m["w"].T), "x, model['w'], labels"),
    "transposed weight": (mean_loss(z=lambda m, x: x @ m["w"]), "x, model['w'].T, labels"),
    "a weight of two": (mean_loss(z=lambda m, x: x @ (m["w"] * 2).T), "x, weight.T, labels"),
    "in jit": (jax.jit(mean_loss()), W_AND_B),
    "vmap": (mean_loss(z=lambda m, x: jax.vmap(jax.vmap(lambda x: m["w"] @ x + m["b"]))(x)),
        W_AND_B),
    "temperature": (mean_loss(z=lambda m, x: logits(m, x) / 2.5),
        "x, model['w'] / t, labels, bias=model['b'] / t"),
    "by hand": (mean_loss(lambda l: jnp.sum(l) / 48), W_AND_B),
    "sum": (mean_loss(jnp.sum), W_AND_B + NONE),
    "other number": (mean_loss(lambda l: jnp.sum(l) / 47), W_AND_B + NONE),
    "mask": (mean_loss(lambda l: jnp.sum(l * MASK) / jnp.sum(MASK)), W_AND_B + NONE),
    "square": (mean_loss(lambda l: jnp.mean(l**2)), W_AND_B + NONE),
    "soft-capped": (mean_loss(z=lambda m, x: 30 * jnp.tanh(logits(m, x) / 30)), ""),
    "used twice": (mean_loss(losses=lambda z, y: of_labels(z, y) + jnp.mean(z**2)), ""),
    "no labels": (mean_loss(losses=lambda z, y: jax.nn.logsumexp(z, -1)), ""),
    "no exponentials": (mean_loss(losses=lambda z, y: jnp.take_along_axis(z, y[..., None],
        -1)), ""),
    "all but the last": (mean_loss(losses=lambda z, y: of_labels(z[:, :-1], y[:, 1:])),
        W_AND_B),
    "the first only": (mean_loss(losses=lambda z, y: of_labels(z[:, :1], y[:, :1])), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGITS)
def test_the_call_that_replaces_logits(name):
    loss, arguments = LOGITS[name]
    w = MODEL["w"].T if name == "transposed weight" else MODEL["w"]
    report = explain(loss, {**MODEL, "w": w}, X, LABELS)
    found = [a for a in report.advice if a.kind == "logits"]
    assert len(found) == bool(arguments), str(report)
    for advice in found:
        assert f"`eqg.losses.linear_cross_entropy({arguments})`" in advice.cure
        assert "all 48 by 96 logits" in advice.cure
        assert ("for the 44 labels" in advice.cure) == (name == "all but the last")
        assert ("divided by `t`" in advice.cure) == (name == "temperature")
        assert advice.saves + advice.predicted == report.estimated
        large = {r.cure for r in report.found if r.bytes == 48 * 96 * 4}
        assert large == ({advice.cure} if name != "all but the last" else set())


# ---------------------------------------------------------------- loops over cells

INPUTS, STATES = 4, 32
XS = jnp.ones((1200, INPUTS))
BATCH = jnp.ones((16, 100, INPUTS)), jnp.arange(16) * 6 + 1


def where(on, new, old):
    return jax.tree.map(lambda n, o: jnp.where(on, n, o), new, old)


def plain(cell, s, x, t):
    return cell(x, s)


def masked(cell, s, x, t):
    return where(t < 700, cell(x, s), s)


def of_lstm(step):
    return lambda cell, s, x, t: step(*cell(x, s), *s, x)


def stopped(cell, s, x, t):
    return cell(x, jax.tree.map(lax.stop_gradient, s))


# A step, and what is said of it: a layer of a "GRU" or an "LSTM", with "lengths" or "more"
# than the cell; nothing if no layer does the same.
CELLS = {
    "GRU": (plain, "GRU"), "LSTM": (plain, "LSTM"), "GRU, mask": (masked, "GRU lengths"),
    "LSTM, mask": (masked, "LSTM lengths"),
    "the other case": (lambda cell, s, x, t: where(t >= 700, s, cell(x, s)), "GRU lengths"),
    "by cond": (lambda cell, s, x, t: lax.select(jnp.full(s.shape, t < 9), cell(x, s), s),
        "GRU lengths"),
    "of the input": (lambda cell, s, x, t: cell(jnp.tanh(x), s), "GRU more"),
    "of the state": (lambda cell, s, x, t: jnp.tanh(2 * cell(x, s)), ""),
    "a mask of the state": (lambda cell, s, x, t: where(s[0] < 0.5, cell(x, s), s), ""),
    "a mask of units": (lambda cell, s, x, t: jnp.where(jnp.arange(32) < t, cell(x, s), s),
        ""),
    "reset": (lambda cell, s, x, t: jnp.where(t < 9, cell(x, s), 0.0), ""),
    "a factor": (lambda cell, s, x, t: (lambda m: m * cell(x, s) + (1 - m) * s)(jnp.where(t <
        9, 1.0, 0.0)), ""),
    "an input of the state": (lambda cell, s, x, t: cell(x + s[:4], s), ""),
    "stopped": (stopped, ""), "LSTM, stopped": (stopped, ""),
    "other weights": (lambda cell, s, x, t: eqx.tree_at(lambda c: c.weight_hh, cell,
        cell.weight_hh * (1 + x[0]))(x, s), ""),
    "LSTM, swapped": (of_lstm(lambda h, c, h0, c0, x: (c, h)), ""),
    "LSTM, half a mask": (of_lstm(lambda h, c, h0, c0, x: (where(x[0] > 0, h, h0), c)), ""),
    "LSTM, two masks": (of_lstm(lambda h, c, h0, c0, x: (where(x[0] > 0, h, h0), where(x[1] >
        0, c, c0))), ""),
    "LSTM, opposite": (of_lstm(lambda h, c, h0, c0, x: (where(x[0] > 0, h, h0), where(x[0] > 0,
        c0, c))), ""),
    "LSTM, one mask": (of_lstm(lambda h, c, h0, c0, x: (where(x[0] > 0, h, h0), where(x[0] > 0,
        c, c0))), "LSTM lengths more"),
    "LSTM, renamed": (lambda cell, s, x, t: cell(x, s[::-1])[::-1], "LSTM"),
}  # fmt: skip


def run_cell(step, cell, xs, first=None, reverse=False):
    zeros = jnp.zeros(STATES)
    zeros = zeros if first is None else first
    init = (zeros, zeros) if isinstance(cell, eqx.nn.LSTMCell) else zeros

    def body(s, at):
        s = step(cell, s, *at)
        return s, jax.tree.leaves(s)[0]

    return lax.scan(body, init, (xs, jnp.arange(len(xs))), reverse=reverse)


def make_cell(name):
    kind = eqx.nn.LSTMCell if name.startswith("LSTM") else eqx.nn.GRUCell
    return kind(INPUTS, STATES, key=jr.key(0))


def layers_of(report):
    return [text for text in report.remarks if "from_cell" in text]


@pytest.mark.parametrize("name", CELLS)
def test_the_layer_that_does_the_same_as_a_loop(name):
    step, said = CELLS[name]
    layer, *more = said.split() or [""]
    loss = lambda cell, xs: jnp.sum(run_cell(step, cell, xs)[1] ** 2)
    found = layers_of(explain(loss, make_cell(name), XS))
    assert len(found) == bool(said)
    for text in found:
        lengths = ", lengths=lengths" * ("lengths" in more)
        assert f'`eqg.nn.{layer}.from_cell(cell, keep="states")(xs{lengths})`' in text
        assert ("a mask says so" in text) == ("lengths" in more)
        assert ("does more" in text) == ("more" in more)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_the_layer_for_a_batch_with_masks(kind):
    def loop(cell, xs, length):
        step = lambda cell, s, x, t: where(t < length, cell(x, s), s)
        return jax.tree.leaves(run_cell(step, cell, xs)[0])[0]

    batch = lambda cell, xs, n: jnp.sum(jax.vmap(loop, (None, 0, 0))(cell, xs, n) ** 2)
    (text,) = layers_of(explain(batch, make_cell(kind), *BATCH))
    assert f'eqg.nn.{kind}.from_cell(cell, keep="states")(xs, lengths=lengths)' in text


@pytest.mark.parametrize("state", [None, 0.1 * jnp.ones(STATES)])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_state_and_the_direction(state, reverse):
    loss = lambda cell, xs, s: jnp.sum(run_cell(plain, cell, xs, s, reverse)[1] ** 2)
    (text,) = layers_of(explain(loss, make_cell("GRU"), XS, state))
    arguments = "xs" if state is None else "xs, state"
    of_cell = 'cell, keep="states", reverse=True' if reverse else 'cell, keep="states"'
    assert f"from_cell({of_cell})({arguments})`" in text
    assert ("`state` is the first state" in text) == (state is not None)


@pytest.mark.parametrize("n", [1024, 1025])
def test_few_states_are_not_worth_a_layer(n):
    """2**15 numbers in all states, or less."""
    loss = lambda cell, xs: jnp.sum(run_cell(plain, cell, xs)[1] ** 2)
    assert len(layers_of(explain(loss, make_cell("GRU"), jnp.ones((n, INPUTS))))) == (n > 1024)


# ---------------------------------------------------------------- loops and layers


class Layer(eqx.Module):
    """`n` sines of a product with a matrix of so many units."""

    weight: jax.Array
    n: int = eqx.field(static=True, default=2)

    def __call__(self, x):
        for _ in range(self.n):
            x = jnp.sin(self.weight @ x)
        return x


def repeated(layer, x, n=8):
    return lax.scan(lambda x, _: (layer(x), None), x, None, length=n)[0]


def nested(m, x):
    return lax.scan(lambda x, _: (repeated(m["a"], x, 4) * 2, None), x, None, length=6)[0]


W16, X16 = jnp.eye(16), jnp.ones((16, 40))
ROW = 16 * 40 * 4  # the bytes of one array
OF_A, OF_MODEL, EACH = (
    "Wrap `['a']` in",
    "Wrap the model, an instance of `Layer`,",
    "each call of",
)
# A loss, a model, the arrays that are kept, and words of each advice: of several calls the
# numbers add up. A single call has to be computed again as a whole when the peak is reached.
LAYERS = {
    "once": (lambda m, x: m["a"](x), {"a": Layer(W16, 6)}, 11, []),
    "twice": (lambda m, x: m["a"](m["a"](x)), {"a": Layer(W16, 6)}, 23, [OF_A]),
    "two layers": (lambda m, x: m[0](m[1](x)), [Layer(W16, 6)] * 2, 23, [EACH]),
    "loop": (lambda m, x: repeated(m["a"], x, 16), {"a": Layer(W16)}, 64, [OF_A,
        "checkpoint=2)`"]),
    "two loops": (lambda m, x: repeated(m["a"], repeated(m["a"], x)), {"a": Layer(W16)}, 64,
        [OF_A, "called 2 times, by `eqg.filter_scan(..., checkpoint=2)`"]),
    "nested": (nested, {"a": Layer(W16)}, 96, [OF_A, "checkpoint=1)`", "checkpoint=1)`"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_advice_on_layers_that_are_called_several_times(name):
    loss, model, n_kept, expected = LAYERS[name]
    report = explain(lambda m, x: jnp.sum(loss(m, x)), model, X16)
    assert report.total == n_kept * ROW == sum(report.by_path().values())
    cures = sorted(a.cure for a in report.advice)
    assert len(cures) == len(expected)
    for words in expected:
        assert any(words in cure for cure in cures)
    for advice in report.advice:
        assert advice.saves + advice.predicted == report.estimated
        assert advice.saves > 0.1 * report.estimated
        assert not (advice.is_undone and advice.kind == "loop")
    predicted = [a.predicted for a in report.advice]
    assert predicted == sorted(predicted)
    # Each residual has the best advice on it.
    assert {r.cure for r in report.found} <= {"", *(a.cure for a in report.advice)}
    if report.advice and "once" not in name:
        assert {r.cure for r in report.found} == {report.advice[0].cure}


class Unit(eqx.Module):
    """A gated unit of the user's."""

    w: jax.Array
    v: jax.Array

    def __call__(self, x, h):
        gate = jax.nn.sigmoid(self.w @ h)
        return (1 - gate) * h + gate * jnp.tanh(self.v @ x + self.w @ (gate * h))


def vmap_outside(cell, xs, checkpoint=None, outputs=False, change=lambda x: x):
    def one(xs):
        def step(h, x):
            h = cell(change(x), h)
            return h, h if outputs else None

        h, hs = eqg.filter_scan(step, jnp.zeros(32), xs, checkpoint=checkpoint)
        return hs if outputs else h

    return jnp.mean(jax.vmap(one)(xs) ** 2)


def vmap_inside(cell, xs, checkpoint, outputs=False):
    def step(h, x):
        h = jax.vmap(cell)(x, h)
        return h, h if outputs else None

    h, hs = eqg.filter_scan(step, jnp.zeros((8, 32)), xs, checkpoint=checkpoint)
    return jnp.mean((hs if outputs else h) ** 2)


def unit(n=4):
    return Unit(jnp.eye(32), jnp.ones((32, n))), jnp.ones((8, 200, n))


def _host(x):
    return jax.pure_callback(lambda x: x, x, lax.stop_gradient(x), vmap_method="expand_dims")


@pytest.mark.parametrize(("n", "outputs"), [(4, True), (64, False)])
def test_advice_on_a_loop_in_a_vmap_is_what_a_loss_written_so_keeps(n, outputs):
    cell, xs = unit(n)
    report = explain(lambda cell, xs: vmap_outside(cell, xs, None, outputs), cell, xs)
    loops = [a for a in report.advice if a.kind == "loop"]
    assert len(loops) == (1 if n == 4 and not outputs else 2)
    for advice in loops:
        (every,) = map(int, re.findall(r"checkpoint=(\d+)", advice.cure))
        moves = "into its step" in advice.cure
        loss, x = (vmap_inside, jnp.swapaxes(xs, 0, 1)) if moves else (vmap_outside, xs)
        followed = explain(lambda cell, xs, f=loss, k=every: f(cell, xs, k, outputs), cell, x)
        more = xs.nbytes if moves else 0  # the data are transposed before, once
        np.testing.assert_allclose(advice.predicted, followed.estimated + more, rtol=0.03)
        assert ("outputs" in advice.cure) == outputs
    # The copy of the data is worth a remark if it is a tenth of what is left.
    remarks = [text for text in report.remarks if "a second time, transposed" in text]
    assert len(remarks) == (not outputs)
    for text in remarks:
        assert f"keeps `xs` a second time, transposed ({25 if n == 4 else 400} KiB)" in text


def gates(layer, keep):
    return layer(4, 32, key=jr.key(0), keep=keep), jnp.ones((8, 200, 4))


of_outputs = lambda layer, xs: jnp.mean(layer(xs)[0] ** 2)
ANY_CELL, KEEPS = "`eqg.nn.Recurrent` runs any cell", 'With `keep="states"` it keeps'
# A loss and its arguments; words of a remark, and words that no remark has.
REMARKS = {
    "a cell of the user's": (lambda c, xs: vmap_outside(c, xs, None, True), unit(), ANY_CELL,
        "is replayed"),
    "no cell": (lambda w, xs: vmap_outside(lambda x, h: jnp.tanh(w @ jnp.tanh(h) + x[0]), xs),
        (jnp.eye(32), unit()[1]), "can be replayed", "Recurrent"),
    "host code": (lambda c, xs: vmap_outside(c, xs, None, True, _host), unit(), "",
        "replayed"),
    "a replay": (lambda c, xs: vmap_outside(c, xs, "replay"), unit(), "is replayed",
        "can be replayed"),
    "gates of a GRU": (of_outputs, gates(eqg.nn.GRU, "gates"),
        f"`GRU` keeps the gates of each " f"step. {KEEPS}", "LSTM"),
    "states of a GRU": (of_outputs, gates(eqg.nn.GRU, "states"), "", "keeps the gates"),
}  # fmt: skip


@pytest.mark.parametrize("name", REMARKS)
def test_remarks_on_loops(name):
    loss, args, words, never = REMARKS[name]
    text = " ".join(explain(loss, *args).remarks)
    assert words in text
    assert never not in text
    if words == ANY_CELL:  # the figure is that of the replay
        left = explain(lambda c, xs: vmap_outside(c, xs, "replay", True), *args).estimated
        (shown,) = re.findall(r"By the estimate, ([\d.]+) KiB are left", text)
        np.testing.assert_allclose(float(shown) * 1024, left, rtol=0.05)


# ---------------------------------------------------------------- residuals and the report


def rule_with_residual(decorate):
    f = decorate(jnp.sin)
    define = (
        f.defvjp if decorate is jax.custom_vjp else lambda a, b: (f.def_fwd(a), f.def_bwd(b))
    )
    define(lambda x: (jnp.sin(x), jnp.cumsum(x)), lambda y, ct: (ct * y,))
    return f


N = 7
# A function of 7 numbers, and of each array that its sum keeps: operation, kind, steps, bytes.
KEPT = {
    "computed": (lambda x: jnp.sin(jnp.cumsum(x)), {("sin", "computed", 1, 28)}),
    "a function of the argument": (jnp.sin, {("sin", "recomputable", 1, 28)}),
    "a constant": (lambda x: x * jnp.arange(7.0), {("iota", "constant", 1, 28)}),
    "an input": (lambda x: x * x, {("model", "input", 1, 28)}),
    "a rule": (rule_with_residual(eqg.custom_vjp), {("sin", "rule", 1, 28)}),
    "carry": (lambda x: lax.scan(lambda h, _: (jnp.sin(h), None), x, None, 5)[0], {("sin",
        "computed", 5, 140)}),
    "carry of a product": (lambda x: lax.scan(lambda h, _: (h * h, None), x, None, 5)[0],
        {("mul", "carry", 5, 140)}),
    "checkpoint": (lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(jnp.cumsum(x)),
        {("cumsum", "computed", 1, 28)}),
    "twice the same": (lambda x: (lambda y: y * y)(jnp.cumsum(x)), {("cumsum", "computed", 1,
        28)}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name):
    fn, expected = KEPT[name]
    report = explain(lambda x: jnp.sum(fn(x)), jnp.ones(N))
    records = [*report.found, *report.inputs]
    assert {(r.primitive, r.kind, r.n_steps, r.bytes) for r in records} == expected
    assert len(records) == len(expected)
    assert {r.shape for r in records} <= {(N,), ()}
    assert report.total == sum(r.bytes for r in report.found)
    assert bool(report) == bool(report.found)
