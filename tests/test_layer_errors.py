"""What recurrent and quantized layers say of cells, states, keys and weights that do not
fit."""

import functools as ft

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError, ste


KEY = jr.key(0)
XS = np.ones((2, 5, 3), "float32")
LSTM_CELL = eqx.nn.LSTMCell(3, 4, dtype="float32", key=KEY)
GRU_CELL = eqx.nn.GRUCell(3, 4, dtype="float32", key=KEY)


# These would refuse some arguments first.
pytestmark = pytest.mark.usefixtures("without_type_checks")


def raises(match):
    return pytest.raises(RuleError, match=match)


def with_cells(layer, cells):
    return eqx.tree_at(lambda layer: layer.cells, layer, cells)


# ---------------------------------------------------------------- cells


def test_the_number_of_cells():
    layer = nn.LSTM(3, 4, num_layers=2, bidirectional=True, key=KEY)
    few = with_cells(layer, ((LSTM_CELL,),))
    assert few(XS)[0].shape == (2, 5, 4)
    for cells in ((GRU_CELL,), GRU_CELL, (), ((GRU_CELL,) * 3,)):
        with raises("`GRU` are not a tuple of tuples(?s:.)*one for each direction"):
            with_cells(nn.GRU(3, 4, key=KEY), cells)(XS)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.MinGRU(3, 4, key=KEY), "`LinearGates`"),
        (nn.LRU(3, 4, 4, key=KEY), "`LRUCell`"),
        (nn.S5(3, 4, 4, key=KEY), "`S5Cell`"),
        (nn.LIF(3, 4, beta=0.9, key=KEY), "`LIFCell`"),
    ],
)
def test_the_types_of_cells(layer, expected):
    found = r"`cells\[0\]\[0\]` is a `GRUCell`, and has to be of type " + expected
    with raises(
        f"(?s)A cell of `{type(layer).__name__}` is.*{found}.*Recurrent`, which runs any"
    ):
        with_cells(layer, ((GRU_CELL,),))(XS)


def test_the_sizes_of_cells():
    small = eqx.nn.GRUCell(3, 2, key=KEY)
    layer = with_cells(nn.GRU(3, 4, bidirectional=True, key=KEY), ((GRU_CELL, small),))
    with raises(r"`GRU` are not of one size(?s:.)*shapes \(4,\), \(2,\)"):
        layer(XS)


class Leaky(eqx.Module):
    weight: jax.Array

    def __call__(self, x, state):
        return jnp.tanh(self.weight @ x + state)


@pytest.mark.parametrize("sizes", [(2, 4), (3, 5)])
def test_an_error_of_the_cell_has_the_sizes(sizes):
    weight, state = jnp.ones((4, sizes[0]), "float32"), jnp.zeros(sizes[1], "float32")
    with pytest.raises(TypeError, match="shape") as info:
        nn.Recurrent(Leaky(weight), initial_state=state)(XS)
    (note,) = (note for note in info.value.__notes__ if "recurrent layer" in note)
    called = f"one input, float32[3], and one state, float32[{sizes[1]}]"
    assert "in `Leaky`" in note
    assert called in note


# ---------------------------------------------------------------- the first state


class Starting(eqx.Module):
    first: jax.Array
    trained: bool

    def __call__(self, x, state):
        return x + state / 2

    def initial_state(self):
        return self.first if self.trained else jax.lax.stop_gradient(self.first)


def test_a_first_state_that_is_not_trained():
    """As the docstring says: an argument is trained, whatever it is, and the method's array is
    trained unless the method stops the gradient."""
    first = jnp.ones(3, "float32")
    gradient = eqx.filter_grad(lambda layer: jnp.sum(layer(XS)[0]))
    for given in (first, np.ones(3, "float32"), jax.lax.stop_gradient(first)):
        layer = nn.Recurrent(lambda x, state: x + state / 2, initial_state=given)
        assert np.all(gradient(layer).initial_state != 0)
    for trained in (True, False):
        grads = gradient(nn.Recurrent(Starting(first, trained)))
        assert np.all((grads.cells[0][0].first != 0) == trained)
    with raises(r"a method `initial_state\(\)`(?s:.)*which becomes a parameter and is trained"):
        nn.Recurrent(lambda x, state: x + state)(XS)


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    "make",
    [
        nn.LSTM,
        pytest.param(nn.MinGRU, marks=pytest.mark.thorough),
        pytest.param(ft.partial(nn.LIF, beta=0.9), marks=pytest.mark.thorough),
    ],
)
def test_a_call_with_dropout_needs_a_key(make):
    layer = make(3, 4, num_layers=2, dropout=0.3, key=KEY)
    asks = r"`dropout` is 0.3, and `key` of the call.*xs, key=key\).*inference=True"
    for call in (layer, nn.Outputs(layer), jax.vmap(layer)):
        with raises(rf"(?s)A call of `{type(layer).__name__}` with dropout.*{asks}"):
            call(XS)
    with raises("The `key` of `.*` is not a random key"):
        layer(XS, key=jnp.ones(3))
    quiet = layer(XS, inference=True)
    assert eqx.tree_equal(eqx.nn.inference_mode(layer)(XS), quiet)


def test_the_keys_of_dropout():
    """As the docstring of the call says."""
    layer = nn.RNN(3, 8, num_layers=3, dropout=0.5, key=KEY)
    batch = layer(XS, key=KEY)[0]
    assert not np.array_equal(batch[0], batch[1])  # of equal examples
    same = jax.vmap(lambda x: layer(x, key=KEY)[0])(XS)
    assert np.array_equal(same[0], same[1])
    keys = jr.split(KEY, len(XS))
    other = jax.vmap(lambda x, key: layer(x, key=key)[0])(XS, keys)
    assert not np.array_equal(other[0], other[1])
    assert not np.array_equal(other, batch)

    # The key is split before each layer but the first.
    ys, key, dropout = jnp.swapaxes(jnp.asarray(XS), 0, 1), KEY, eqx.nn.Dropout(0.5)
    for i, ((cell,),) in enumerate(zip(layer.cells, strict=True)):
        if i > 0:
            key, subkey = jr.split(key)
            ys = dropout(ys, key=subkey)
        ys = nn.Recurrent(cell, time_major=True)(ys)[0]
    np.testing.assert_allclose(jnp.swapaxes(ys, 0, 1), batch, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- quantized layers


def test_a_layer_whose_scale_is_zero():
    linear = eqx.nn.Linear(4, 3, key=KEY)
    zero = eqx.tree_at(lambda layer: layer.weight, linear, jnp.zeros((3, 4)))
    model = {"body": linear, "head": zero}
    loss = lambda model: jnp.sum((model["head"](jnp.ones(4)) - 1) ** 2)
    gradient = lambda model: eqx.filter_grad(loss)(model)["head"].weight
    text = r"The scale of a `Ternary` is zero(?s:.)*\(3, 4\)(?s:.)*scale=False"
    with pytest.warns(UserWarning, match=text):
        new, _ = nn.quantize_model(model, {eqx.nn.Linear: nn.Ternary()})
    assert not np.any(gradient(new))
    for quantizer in (nn.Ternary(scale=False), nn.Binary()):
        new, _ = nn.quantize_model(model, {eqx.nn.Linear: quantizer})
        assert np.all(gradient(new) != 0)
    # Nothing is known of a weight.
    eqx.filter_eval_shape(lambda zero: nn.Quantized(zero, nn.Ternary()), zero)


def test_a_threshold_above_all_weights():
    linear = eqx.nn.Linear(4, 3, key=KEY)
    with pytest.warns(UserWarning, match="`threshold` is 3.0(?s:.)*smaller"):
        nn.Quantized(linear, nn.Ternary(threshold=3.0))
    nn.Quantized(linear, nn.Ternary(threshold=3.0, scale=False))


def test_lists_say_what_they_leave_out():
    model = [eqx.nn.Linear(1, 1, key=key) for key in jr.split(KEY, 13)]
    with raises(r"is `\[9\]`, Linear\n(?s:.)*  and 3 more\nA layer of"):  # with the list
        nn.quantize_model(model, {eqx.nn.Conv: nn.LSQ(4)})
    with raises(r"there is `\[0\]`, Linear\n(?s:.)*  and 3 more\nA layer of"):
        nn.quantize_model(model, {"layers[0]": nn.LSQ(4)})
    arrays = [jnp.ones(2)] * 7
    with raises(r"there is `\[6\]`, an array\n(?s:.)*A layer of"):
        nn.quantize_model(arrays, {"[?]": nn.LSQ(4)})
    new, _ = nn.quantize_model(model, {eqx.nn.Linear: (ste.ternary, None)})
    with raises(r"`\[7\]`: `ternary` has(?s:.)*  and 5 more\n(?s:.)*Ternary"):
        nn.to_integers(new)
