"""Recurrent layers against PyTorch and Flax with the same weights.

Their outputs, last states and gradients are recorded, by `fixtures/record_recurrent.py`.
"""

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .fixtures.record_recurrent import (
    Case,
    FLAX,
    HERE,
    HIDDEN,
    INPUT,
    inputs,
    LENGTHS,
    TORCH,
)
from .helpers import quick_only


QUICK = ("GRU, 2 layers, bidirectional, packed", "LSTM", "RNN")


def load(layer, case, weights):
    """Our layer with PyTorch's weights. It has two biases for each gate, which are the same
    one but in the new state of a GRU, where the second is multiplied by the reset gate."""
    weights = iter(weights)

    def load_cell(cell):
        w = next(weights)
        values = [w["weight_ih"], w["weight_hh"]]
        where = lambda c: [c.weight_ih, c.weight_hh, c.bias]
        if case.layer == "GRU":
            gates, new = jnp.split(w["bias_hh"], [2 * HIDDEN])
            values += [w["bias_ih"] + jnp.concatenate([gates, 0 * new]), new]
            where = lambda c: [c.weight_ih, c.weight_hh, c.bias, c.bias_n]
        else:
            values += [w["bias_ih"] + w["bias_hh"]]
        return eqx.tree_at(where, cell, values)

    cells = tuple(tuple(load_cell(cell) for cell in stage) for stage in layer.cells)
    return eqx.tree_at(lambda layer: layer.cells, layer, cells)


def our_numbers(case, *, one_bias=False, **options):
    """What `torch_numbers` returns, of our layer."""
    given = inputs(case)
    if one_bias:
        for w in given.weights:
            w["bias_hh"] = 0 * w["bias_hh"]

    def run(weights, xs, states):
        layer = getattr(nn, case.layer)(
            INPUT,
            HIDDEN,
            num_layers=case.layers,
            bidirectional=case.bidirectional,
            dtype="float64",
            key=jax.random.key(0),
            **options,
        )
        states = states if len(case.cells) > 1 else [s[0] for s in states]
        state = tuple(states) if len(states) == 2 else states[0]
        lengths = LENGTHS if case.packed else None
        ys, last = load(layer, case, weights)(xs, state, lengths=lengths)
        last = last if isinstance(last, tuple) else (last,)
        return ys, last if len(case.cells) > 1 else [s[None] for s in last]

    def loss(*args):
        ys, last = run(*args)
        pairs = zip(last, given.ct_states, strict=True)
        total = jnp.sum(ys * given.ct_ys) + sum(jnp.sum(s * ct) for s, ct in pairs)
        return total, (ys, last)

    args = jax.tree.map(jnp.asarray, (given.weights, given.xs, given.states))
    grads, (ys, last) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*args)
    numbers = {"ys": ys, "grad xs": grads[1]}
    for i, (s, g) in enumerate(zip(last, grads[2], strict=True)):
        numbers |= {f"last {i}": s, f"grad state {i}": g}
    for i, grad in enumerate(grads[0]):
        numbers |= {f"grad {name} {i}": g for name, g in grad.items()}
    return numbers


def recorded(library, kind):
    with np.load(HERE / f"recurrent_{library}.npz") as numbers:
        return {
            name.removeprefix(f"{kind}/"): numbers[name]
            for name in numbers.files
            if name.startswith(f"{kind}/")
        }


def check(ours, theirs):
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("kind", quick_only(TORCH, QUICK, pytest.mark.slow))
def test_torch(kind):
    with jax.enable_x64(True):
        ours, theirs = our_numbers(TORCH[kind]), recorded("torch", kind)
    assert ours.keys() == theirs.keys()
    check(ours, theirs)


@pytest.mark.parametrize("kind", quick_only(FLAX, ("GRUCell",), pytest.mark.slow))
def test_flax(kind):
    with jax.enable_x64(True):
        case = Case(FLAX[kind])
        ours, theirs = our_numbers(case, one_bias=True, keep="states"), recorded("flax", kind)
    is_bias_hh = {name for name in ours if "bias_hh" in name}
    assert ours.keys() - is_bias_hh == theirs.keys()
    check(ours, theirs)


def test_torch_with_a_projection():
    """Recorded from `torch.nn.LSTM(2, 4, proj_size=3)` of PyTorch 2 in double precision."""
    draw = np.random.RandomState(7).standard_normal
    w_ih, w_hh, b_ih, b_hh, w_hr = map(draw, [(16, 2), (16, 3), (16,), (16,), (3, 4)])
    h = [0.22309834418461358, -0.16683155656572413, 0.007550973825246679]
    c = [1.5064035084155964, 0.013719158197256429, 1.0644478014722067, 0.12354295184448302]
    xs = draw((1, 3, 2))[0]
    with jax.enable_x64(True):
        lstm = nn.LSTM(2, 4, proj_size=3, dtype="float64", key=jax.random.key(0))
        names = ("weight_ih", "weight_hh", "bias", "weight_hr")
        parts = lambda m: [getattr(m.cells[0][0], name) for name in names]
        lstm = eqx.tree_at(parts, lstm, list(map(jnp.array, (w_ih, w_hh, b_ih + b_hh, w_hr))))
        ys, last = lstm(jnp.array(xs))
        for x, y in zip((ys[-1], *last), (h, h, c), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12)
