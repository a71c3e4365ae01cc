"""Options, inputs and states that layers refuse, by the names of the user; and their leaves.

The guard has tables of wrong arguments and errors: these are the others.
"""

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


KEY = jr.key(0)
X = np.array([0.3, -0.9, 2.0], "float32")
XS = np.ones((2, 5, 3), "float32")
gru_cell = lambda: eqx.nn.GRUCell(3, 4, key=KEY)
STACKS = {
    **{name: ft.partial(getattr(nn, name), 3, 4, key=KEY) for name in ("GRU", "LSTM", "RNN")},
    **{name: ft.partial(getattr(nn, name), 3, 4, key=KEY) for name in ("MinGRU", "MinLSTM")},
    **{name: ft.partial(getattr(nn, name), 3, 4, 4, key=KEY) for name in ("LRU", "S5")},
    "GatedDeltaNet": ft.partial(nn.GatedDeltaNet, 3, 4, heads=2, key_size=2, key=KEY),
    "SelectiveSSM": ft.partial(nn.SelectiveSSM, 3, 4, 3, key=KEY),
}


# These would refuse some arguments first.
pytestmark = pytest.mark.usefixtures("without_type_checks")


def raises(match):
    return pytest.raises(RuleError, match=match)


# ---------------------------------------------------------------- options


GRU, VQ = STACKS["GRU"], ft.partial(nn.VectorQuantizer, key=KEY)


def test_what_is_taken():
    """Integers of NumPy; what is traced; a probability that is rounded."""
    four, int_ = np.int64(4), np.int32
    assert nn.FSQ(np.array([8, 5, 5])).num_codes == 200
    assert nn.LSQ(four).bits == nn.FakeQuantize(four, channel_axis=int_(0)).bits == 4
    assert VQ(four, int_(3), axis=int_(-1)).codebook.shape == (4, 3)
    flags = dict.fromkeys(("bidirectional", "reverse", "use_bias", "time_major"), np.True_)
    layer = nn.GRU(int_(3), four, num_layers=np.int8(2), key=KEY, **flags)
    assert eqx.filter_eval_shape(layer, XS)[0].shape == (2, 5, 8)
    traced = jax.jit(lambda s, z: ste.fake_quantize(X, s, zero_point=z))(-0.1, 300)
    assert traced.shape == X.shape  # not looked at
    assert ste.bernoulli(np.float32(1 + 2e-7), key=KEY) == 1.0
    # Traced, a negative length counts as no step, as the docstring says.
    ys, last = jax.jit(lambda n: GRU()(XS[0], lengths=n))(-1)
    assert not np.any(ys)
    assert not np.any(last)


# ---------------------------------------------------------------- leaves


@pytest.mark.parametrize("name", STACKS)
def test_leaves_of_layers_over_time(name):
    """In this order, which `equinox.tree_serialise_leaves` depends on: cells, initial state,
    dropout."""
    options = {"num_layers": 2, "dropout": 0.5, "reverse": True, "time_major": True}
    options |= {"proj_size": 2} if name == "LSTM" else {}
    layer = STACKS[name](**options, learn_initial_state=True)
    assert layer.reverse
    assert layer.time_major
    first = layer.initial_parts if name in ("LRU", "S5") else layer.initial_state
    expected = [*jax.tree.leaves((layer.cells, first)), 0.5, False]
    leaves = jax.tree.leaves(layer)
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    assert eqx.nn.inference_mode(layer).dropout.inference
    assert eqx.tree_equal(pickle.loads(pickle.dumps(layer)), layer)


# ---------------------------------------------------------------- inputs, lengths and states

gru5 = lambda n=3: nn.GRU(n, 5, dtype="float32", key=KEY)
LENGTHS, BY_NAME = jnp.array([2, 3]), r"does not fit(?s:.)*`layer\(xs, lengths=lengths\)`"
KEY_BY_NAME = r"(?s)`state`.*`layer\(xs, key=key\)`"
ONE_INTEGER = r"do not fit `xs`(?s:.)*one sequence of 5 steps\nPass one integer.*`jax\.vmap\("
ERRORS = [
    (lambda: gru5()(jr.split(KEY, (2, 5, 3))), r"does not fit\.\n  `xs` is key<"),
    (lambda: gru5(1)(XS[0]), r"A sequence of numbers is `xs\[\.\.\., None\]`"),
    *((lambda key=key: gru5()(XS, key), KEY_BY_NAME) for key in (KEY, jr.PRNGKey(0))),
    *((lambda s=s: gru5()(XS, s), BY_NAME) for s in (LENGTHS, [2, 2], jnp.ones(5))),
    (lambda: gru5().step([1.0, 2.0]), r"`GRU` was given `x` that does not fit"),
    (lambda: gru5().step(XS), r"`x` is float32\[2,5,3\](?s:.)*call the layer itself"),
    (lambda: nn.Recurrent([gru_cell(), 2 * [gru_cell()]]).step(X), "`Recurrent.step` was"),
    (lambda: jax.vmap(lambda x: gru5()(x, lengths=LENGTHS))(XS), ONE_INTEGER),
    (lambda: nn.Outputs(gru_cell()), r"(?s)it is GRUCell.*`eqx_grads.nn.Recurrent\("),
]


def test_errors_of_calls():
    for call, match in ERRORS:
        with raises(match):
            call()


# ---------------------------------------------------------------- cells


class Leaky(eqx.Module):
    weight: jax.Array

    def __call__(self, x, state):
        return jnp.tanh(self.weight @ x + state)


def test_errors_of_a_cell():
    """They say what the cell was called with."""

    def count(x, state):
        return jnp.sum(x), {"steps": state[1]["steps"].astype("float32")}

    first = jnp.zeros((), "float16"), {"steps": jnp.array(0)}
    match = (
        r"(?s)state\[1\]\['steps'\]: it was given int.* returned float.*in `.*count`.*cast to"
    )
    with raises(match):
        nn.Recurrent(count, initial_state=first)(XS)
    # Of two float leaves, the inputs widen one, and that one widens the other.
    chain = lambda x, state: (state[1], jnp.sum(x) + state[1].astype(x.dtype))
    half = (jnp.zeros((), "float16"),) * 2
    assert nn.Recurrent(chain, initial_state=half)(XS)[0].dtype == XS.dtype
    for sizes in ((2, 4), (3, 5)):
        weight, state = jnp.ones((4, sizes[0]), "float32"), jnp.zeros(sizes[1], "float32")
        with pytest.raises(TypeError, match="shape") as info:
            nn.Recurrent(Leaky(weight), initial_state=state)(XS)
        (note,) = (note for note in info.value.__notes__ if "recurrent layer" in note)
        assert "in `Leaky`" in note
        assert f"one input, float32[3], and one state, float32[{sizes[1]}]" in note


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
    for given in (np.ones(3, "float32"), jax.lax.stop_gradient(first)):
        layer = nn.Recurrent(lambda x, state: x + state / 2, initial_state=given)
        assert np.all(gradient(layer).initial_state != 0)
    for trained in (True, False):
        grads = gradient(nn.Recurrent(Starting(first, trained)))
        assert np.all((grads.cells[0][0].first != 0) == trained)
