"""The advice of `explain_memory`: on logits, on loops over cells, and on layers.

The sizes are counted by hand from the shapes in the loss. An argument's name is part of a call
that the advice says to write.
"""

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
    "transposed weight": (mean_loss(z=lambda m, x: x @ m["w"]), "x, model['w'].T, labels"),
    "a weight of two": (mean_loss(z=lambda m, x: x @ (m["w"] * 2).T), "x, weight.T, labels"),
    "in jit": (jax.jit(mean_loss()), W_AND_B),
    "vmap": (mean_loss(z=lambda m, x: jax.vmap(jax.vmap(lambda x: m["w"] @ x + m["b"]))(x)),
        W_AND_B),
    "temperature": (mean_loss(z=lambda m, x: logits(m, x) / 2.5),
        "x, model['w'] / t, labels, bias=model['b'] / t"),
    "sum": (mean_loss(jnp.sum), W_AND_B + NONE),
    "mask": (mean_loss(lambda l: jnp.sum(l * MASK) / jnp.sum(MASK)), W_AND_B + NONE),
    "soft-capped": (mean_loss(z=lambda m, x: 30 * jnp.tanh(logits(m, x) / 30)), ""),
    "used twice": (mean_loss(losses=lambda z, y: of_labels(z, y) + jnp.mean(z**2)), ""),
    "no labels": (mean_loss(losses=lambda z, y: jax.nn.logsumexp(z, -1)), ""),
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
    "of the input": (lambda cell, s, x, t: cell(jnp.tanh(x), s), "GRU more"),
    "of the state": (lambda cell, s, x, t: jnp.tanh(2 * cell(x, s)), ""),
    "a mask of the state": (lambda cell, s, x, t: where(s[0] < 0.5, cell(x, s), s), ""),
    "a factor": (lambda cell, s, x, t: (lambda m: m * cell(x, s) + (1 - m) * s)(jnp.where(t <
        9, 1.0, 0.0)), ""),
    "an input of the state": (lambda cell, s, x, t: cell(x + s[:4], s), ""),
    "stopped": (stopped, ""), "LSTM, stopped": (stopped, ""),
    "other weights": (lambda cell, s, x, t: eqx.tree_at(lambda c: c.weight_hh, cell,
        cell.weight_hh * (1 + x[0]))(x, s), ""),
    "LSTM, swapped": (of_lstm(lambda h, c, h0, c0, x: (c, h)), ""),
    "LSTM, one mask": (of_lstm(lambda h, c, h0, c0, x: (where(x[0] > 0, h, h0), where(x[0] > 0,
        c, c0))), "LSTM lengths more"),
    "LSTM, renamed": (lambda cell, s, x, t: cell(x, s[::-1])[::-1], "LSTM"),
}  # fmt: skip


def run_cell(step, cell, xs):
    zeros = jnp.zeros(STATES)
    init = (zeros, zeros) if isinstance(cell, eqx.nn.LSTMCell) else zeros

    def body(s, at):
        s = step(cell, s, *at)
        return s, jax.tree.leaves(s)[0]

    return lax.scan(body, init, (xs, jnp.arange(len(xs))))


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
OF_A, EACH = "Wrap `['a']` in", "each call of"
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
        assert advice.saves == report.estimated - advice.predicted > 0.1 * report.estimated
        assert not (advice.is_undone and advice.kind == "loop")
    assert {r.cure for r in report.found} == ({report.advice[0].cure} if expected else {""})
