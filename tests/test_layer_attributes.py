"""Attributes and leaves of layers, and errors that layers share with functions."""

import functools as ft
import pickle

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError, ste


OPTIONS = {"num_layers": 2, "dropout": 0.5, "reverse": True, "time_major": True}
RECURRENT = {
    "GRU": lambda **options: nn.GRU(3, 4, **options),
    "LSTM": lambda **options: nn.LSTM(3, 4, **options),
    "RNN": lambda **options: nn.RNN(3, 4, **options),
    "MinGRU": lambda **options: nn.MinGRU(3, 4, **options),
    "MinLSTM": lambda **options: nn.MinLSTM(3, 4, **options),
    "LRU": lambda **options: nn.LRU(3, 4, 4, **options),
    "S5": lambda **options: nn.S5(3, 4, 4, **options),
    "GatedDeltaNet": lambda **options: nn.GatedDeltaNet(3, 4, heads=2, key_size=2, **options),
    "SelectiveSSM": lambda **options: nn.SelectiveSSM(3, 4, 4, state_size=2, **options),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_options_of_recurrent_layers(name):
    layer = RECURRENT[name](**OPTIONS, learn_initial_state=True, key=jr.key(0))
    assert layer.reverse
    assert layer.time_major
    assert layer.dropout.p == 0.5
    assert len(layer.cells) == 2
    assert layer.initial_state is not None
    off = eqx.nn.inference_mode(layer)
    assert off.dropout.inference
    assert not layer.dropout.inference
    layer = eqx.tree_at(lambda layer: layer.dropout.p, layer, 0.0)
    assert layer.dropout.p == 0.0
    assert eqx.tree_equal(pickle.loads(pickle.dumps(layer)), layer)


@pytest.mark.parametrize("name", RECURRENT)
def test_leaves_of_recurrent_layers(name):
    """In this order, which `equinox.tree_serialise_leaves` depends on: cells, initial state,
    dropout."""
    layer = RECURRENT[name](**OPTIONS, learn_initial_state=True, key=jr.key(0))
    is_complex = name in ("LRU", "S5")
    first = layer.initial_parts if is_complex else layer.initial_state
    expected = [*jax.tree.leaves((layer.cells, first)), 0.5, False]
    leaves = jax.tree.leaves(layer)
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))


PROJECTED = {"LSTM, projected": lambda **options: nn.LSTM(3, 4, proj_size=2, **options)}


def test_leaves_of_a_projected_cell_are_arrays():
    cell = PROJECTED["LSTM, projected"](key=jr.key(0)).cells[0][0]
    assert all(map(eqx.is_array, jax.tree.leaves(cell)))


@pytest.mark.parametrize("name", [*RECURRENT, *PROJECTED])
def test_weights_are_drawn_from_keys_of_their_own(name):
    """Two arrays of one key begin with the same numbers."""
    make = ft.partial((RECURRENT | PROJECTED)[name], num_layers=2, bidirectional=True)
    one, other = (jax.tree.leaves(make(key=jr.key(seed)).cells) for seed in (0, 1))
    drawn = [np.ravel(w)[:2] for w, v in zip(one, other, strict=True) if np.any(w != v)]
    assert len(drawn) >= 8
    # Two limits may differ in their scale.
    assert len({tuple(start / abs(start[0])) for start in drawn}) == len(drawn)


def test_parameters_of_neurons():
    rho = np.array([0.5, 0.9, 0.95])
    cell = nn.LIFCell(3, 0.9, rho=rho, threshold=0.5, learn="beta")
    assert isinstance(cell.beta, jax.Array)
    assert cell.beta == jnp.array(0.9)
    assert cell.rho is rho
    assert (cell.alpha, cell.threshold, cell.strength) == (None, 0.5, 1.8)
    assert cell.learn == ("beta",)
    cell = eqx.tree_at(lambda cell: (cell.beta, cell.threshold), cell, (jnp.array(0.8), 0.7))
    assert cell.beta == jnp.array(0.8)
    assert cell.threshold == 0.7
    recurrent = nn.LIFCell(3, 0.9, recurrent=True, learn="beta", key=jr.key(0))
    assert eqx.tree_equal(pickle.loads(pickle.dumps(recurrent)), recurrent)


def test_layers_and_functions_refuse_bits_and_levels_alike():
    bits = {
        "LSQ": lambda: nn.LSQ(25),
        "FakeQuantize": lambda: nn.FakeQuantize(25),
        "ste.lsq": lambda: ste.lsq(jnp.ones(3), 1.0, bits=25),
    }
    levels = {
        "FSQ": lambda: nn.FSQ((1, 5)),
        "ste.fsq": lambda: ste.fsq(jnp.ones(2), (1, 5)),
        "ste.fsq_codebook": lambda: ste.fsq_codebook((1, 5)),
    }
    for calls in (bits, levels):
        texts = set()
        for name, call in calls.items():
            with pytest.raises(RuleError, match=f"`{name}` can't quantize to th") as info:
                call()
            texts.add(str(info.value).replace(name, ""))
        assert len(texts) == 1
