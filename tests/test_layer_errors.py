"""Options, inputs and states that layers refuse, by the names of the user; and their leaves."""

import functools as ft
import pickle

import equinox as eqx
import eqx_grads as eqg
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
LSTM_CELL = eqx.nn.LSTMCell(3, 4, dtype="float32", key=KEY)
GRU_CELL = eqx.nn.GRUCell(3, 4, dtype="float32", key=KEY)
STACKS = {
    **{name: ft.partial(getattr(nn, name), 3, 4, key=KEY) for name in ("GRU", "LSTM", "RNN")},
    **{name: ft.partial(getattr(nn, name), 3, 4, key=KEY) for name in ("MinGRU", "MinLSTM")},
    **{name: ft.partial(getattr(nn, name), 3, 4, 4, key=KEY) for name in ("LRU", "S5")},
}


# These would refuse some arguments first.
pytestmark = pytest.mark.usefixtures("without_type_checks")


def raises(match):
    return pytest.raises(RuleError, match=match)


def with_cells(layer, cells):
    return eqx.tree_at(lambda layer: layer.cells, layer, cells)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("name", STACKS)
def test_options_of_stacks(name):
    make = STACKS[name]
    for dropout in (2.0, -0.1, np.nan, "0.5", True):
        with raises(f"`dropout` of `{name}` is not a probability"):
            make(num_layers=2, dropout=dropout)
    with raises("(?s)a single layer.*Dropout is applied between two layers"):
        make(dropout=0.5)
    for option in ("bidirectional", "learn_initial_state", "reverse", "time_major"):
        with raises(f"(?s)`{option}` of `{name}` is not a bool.*it is 'no'"):
            make(**{option: "no"})
    for dtype in (int, bool, "complex64", "double precision"):
        with raises(f"`dtype` of `{name}` is not a real floating one"):
            make(dtype=dtype)
    for layers in (0, 1.0, True):
        with raises(f"`{name}` was given a size that is not(?s:.)*`num_layers` is {layers}"):
            make(num_layers=layers)
    if "initial" not in name and name not in ("GRU", "LSTM", "RNN"):
        with raises(f"(?s)`{name}` was given an unknown `method`.*'fft'.*'associative'"):
            make(method="fft")


GRU, VQ = STACKS["GRU"], ft.partial(nn.VectorQuantizer, key=KEY)
LIF = ft.partial(nn.LIF, 3, 4, 0.9, key=KEY)
FLAGS = [
    *((LIF, name) for name in ("detach_reset", "recurrent", "use_bias", "reverse")),
    *((make, "signed") for make in (nn.LSQ, nn.FakeQuantize, ft.partial(ste.lsq, X, 0.1))),
    *((nn.FakeQuantize, name) for name in ("narrow", "learn_scale")),
    *((make, "scale") for make in (nn.Binary, nn.Ternary)),
    *((ft.partial(f, X, key=KEY), "hard") for f in (ste.gumbel_softmax, ste.gumbel_sigmoid)),
    (ft.partial(VQ, 3, 4), "ema"),
]
# What the error says, and calls that raise it.
REFUSED = {
    "(not|can't)": [  # a bool is no integer
        lambda: ste.fake_quantize(X, 0.1, bits=True, signed=False),
        lambda: ste.fake_quantize(X, 0.1, zero_point=True),
        lambda: ste.fsq(X, (True, 5, 5)),
        lambda: nn.FakeQuantize(channel_axis=True),
        lambda: nn.FSQ((8, 5), axis=True),
        lambda: VQ(True, 3),
        lambda: nn.RNNCell(3, True, key=KEY),
        lambda: nn.GRU(True, 4, key=KEY),
        lambda: GRU()(XS[0], lengths=True),
        lambda: nn.S5(3, 4, 4, blocks=True, key=KEY),
        lambda: nn.LRU(3, 4, 4, r_max=True, key=KEY),
        lambda: nn.Recurrent(GRU_CELL, checkpoint=True),
        lambda: eqg.clip_gradient_norm(X, 1.0, axis=True),
    ],
    "is not a number": [
        lambda: eqg.surrogates.gaussian("a"),
        lambda: eqg.surrogates.leaky(leak=True),
        lambda: ste.heaviside(X, at_zero="one"),
        lambda: ste.clip(X, "0"),
        lambda: eqg.reversal_schedule("half"),
        lambda: nn.LRU(3, 4, 4, r_min="1", key=KEY),
        lambda: nn.S5(3, 4, 4, min_step="1", key=KEY),
    ],
    "a zero point that is not an integer in its range(?s:.)*from -128 to 127": [
        lambda z=z: ste.fake_quantize(X, 0.1, zero_point=z)
        for z in (300, -129, np.nan, jnp.array(200), np.array([0.0, 0.0, 128.0]))
    ],
    "The (scale|step) of `ste.* is not positive": [
        lambda f=f, s=s: f(X, s)
        for f in (ste.fake_quantize, ste.lsq)
        for s in (jnp.array(0.0), jnp.array([1.0, 1.0, -1.0]), jnp.array(np.nan), 0)
    ],
    "not from zero to one": [
        lambda: ste.bernoulli(2.0, key=KEY),
        lambda: ste.bernoulli(jnp.array([0.5, -0.1]), key=KEY),
    ],
    "a negative progress(?s:.)*the step divided by": [
        lambda: eqg.reversal_schedule(jnp.array([0.5, -0.5]))
    ],
    "`.*.fit` was given nothing(?s:.)*numbers that are not finite": [
        lambda x=x: nn.LSQ(4).fit(jnp.array([1.0, x])) for x in (np.nan, np.inf)
    ],
    "was given a `checkpoint` that it does not know": [
        lambda c=c: nn.Recurrent(GRU_CELL, checkpoint=c) for c in (-1, 0, 2.0, "all")
    ],
    "`activation` of `(LRU|S5)` is not a function(?s:.)*and not its name": [
        lambda kind=kind: STACKS[kind](activation="gelu") for kind in ("LRU", "S5")
    ],
    "`cell` of `Recurrent` is not a function": [lambda: nn.Recurrent(eqx.nn.GRUCell)],
    "(?s)`xs` that are not an array of numbers.*`jnp.stack": [
        lambda: GRU()([[1.0, 2.0, 3.0]]),
    ],
    "(?s)`dtype` of .* is not a real floating one.*such as `jnp.float32`": [
        lambda make=make, d=d: make(dtype=d)
        for make in (ft.partial(nn.RNNCell, 3, 4, key=KEY), ft.partial(VQ, 3, 4))
        for d in (jnp.int32, jnp.complex64)
    ],
    # Rings and steps of linear layers, and sizes.
    r"`LRU` needs `0 <= r_min(?s:.)*  `r_min` is 0.9, `r_max` is": [
        lambda: nn.LRU(3, 4, 4, r_min=0.9, r_max=0.5, key=KEY)
    ],
    r"`max_phase` is -1(?s:.)*a positive phase": [lambda: STACKS["LRU"](max_phase=-1.0)],
    r"`state_size` is 6, `blocks` is 2\nChoose": [lambda: nn.S5(3, 4, 6, blocks=2, key=KEY)],
    r"`min_step` is 0\.1, `max_step` is 0\.01": [
        lambda: STACKS["S5"](min_step=0.1, max_step=0.01)
    ],
    "(?s)a projection that is not smaller.*`proj_size` is 5": [
        lambda: nn.LSTM(3, 5, proj_size=5, key=KEY)
    ],
    "(?s)`keep` is 'all'.*'states'": [lambda: GRU(keep="all")],
    "`activation` is 'gelu'": [lambda: STACKS["RNN"](activation="gelu")],
}


def test_flags():
    for make, option in FLAGS:
        with raises(f"(?s)`{option}` of .* is not a bool.*it is 'no'"):
            make(**{option: "no"})


@pytest.mark.parametrize("match", REFUSED)
def test_refused(match):
    for call in REFUSED[match]:
        with raises(match):
            call()


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


def test_layers_and_functions_refuse_bits_and_levels_alike():
    bits = {"LSQ": lambda: nn.LSQ(25), "ste.lsq": lambda: ste.lsq(X, 1.0, bits=25)}
    levels = {"FSQ": lambda: nn.FSQ((1, 5)), "ste.fsq": lambda: ste.fsq(X[:2], (1, 5))}
    for calls in (bits, levels):
        texts = set()
        for name, call in calls.items():
            with raises(f"`{name}` can't quantize to th") as info:
                call()
            texts.add(str(info.value).replace(name, ""))
        assert len(texts) == 1


# ---------------------------------------------------------------- leaves


@pytest.mark.parametrize("name", STACKS)
def test_leaves_of_layers_over_time(name):
    """In this order, which `equinox.tree_serialise_leaves` depends on: cells, initial state,
    dropout."""
    options = {"num_layers": 2, "dropout": 0.5, "reverse": True, "time_major": True}
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


@pytest.mark.parametrize("name", STACKS)
def test_weights_are_drawn_from_keys_of_their_own(name):
    """Two arrays of one key begin with the same numbers."""
    options = {"num_layers": 2, "bidirectional": True}
    options |= {"proj_size": 2} if name == "LSTM" else {}
    make = lambda seed: STACKS[name](**options, key=jr.key(seed))
    one, other = (jax.tree.leaves(make(seed).cells) for seed in (0, 1))
    drawn = [np.ravel(w)[:2] for w, v in zip(one, other, strict=True) if np.any(w != v)]
    assert len(drawn) >= 8
    # Two limits may differ in their scale.
    assert len({tuple(start / abs(start[0])) for start in drawn}) == len(drawn)


# ---------------------------------------------------------------- inputs, lengths and states

GRU5, ONE = nn.GRU(3, 5, dtype="float32", key=KEY), nn.GRU(1, 4, dtype="float32", key=KEY)
LSTM = nn.LSTM(3, 4, dtype="float32", key=KEY)
ADD = nn.Recurrent(lambda x, h: h + x)
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
    (lambda: GRU5(XS[:, :0, :2]), r"a step of `xs` is float32\[2\], and `input_size`"),
    (lambda: GRU5(XS[0, 0]), r"`xs` with 1 axes(?s:.)*vmap.*of numbers `xs\[:, None\]`"),
    (lambda: GRU5(jr.split(KEY, (2, 5, 3))), r"numbers\.\n  `xs` is a `PRNGKeyArray"),
    (lambda: ONE(XS[0]), r"A sequence of numbers is `xs\[\.\.\., None\]`"),
    (lambda: GRU5(XS.astype("complex64")), "complex numbers(?s:.)*`xs` is complex64"),
    (lambda: GRU5(XS, np.ones((2, 5), "complex64")), "(?s)complex.*`state` is complex64"),
    (lambda: LSTM(XS, (jnp.ones((2, 5)), jnp.ones((2, 4)))), LSTM_STATE),
    (lambda: LSTM(XS, 2 * (jnp.ones(4),)), "5 steps\n.*a state for each example"),
    (lambda: ADD(XS), "does not know the first state of its cell"),
    (lambda: ADD(XS, jnp.ones(3)), r"is \(3,\), without an axis of size 2 for the batch\n"),
    (
        lambda: nn.Recurrent([(GRU_CELL, GRU_CELL)], output=jnp.sum)(XS),
        r"can't join the outputs(?s:.)*one number, float32\n.*`y\[None\]`",
    ),
    # In the shape of the state, this was taken for zeros and ones.
    (lambda: GRU5(XS, ON), r"bool\[2,5\], as masks are(?s:.)*lengths="),
    *((lambda key=key: GRU5(XS, key), KEY_BY_NAME) for key in (KEY, jr.PRNGKey(0))),
    (lambda: jax.vmap(GRU5)(XS, LENGTHS), BY_NAME),
    *((lambda s=s: GRU5(XS, s), BY_NAME) for s in (LENGTHS, [2, 2], jnp.ones(5))),
    (lambda: GRU5.step([1.0, 2.0]), r"`GRU.step` was given an `x` that is not one step"),
    (lambda: GRU5.step(XS), r"`x` is float32\[2,5,3\](?s:.)*call the layer itself"),
    (
        lambda: STACKS["LRU"](bidirectional=True).step(X),
        "`LRU.step` was called on a",
    ),
    (lambda: GRU5(XS, lengths=[2, 6]), "from 2 to 6\n.* 2 sequences of 5 steps\n.*time_major"),
    (lambda: GRU5(XS[:, :0], lengths=[0, 1]), "from 0 to 1\n.*of 0 steps"),
    (lambda: jax.vmap(lambda x: GRU5(x, lengths=LENGTHS))(XS), ONE_INTEGER),
    (lambda: GRU5(XS, lengths=[1] * 5), LENGTHS_ARE.format(r"int..\[5\]", ".*Did you swap")),
    (lambda: GRU5(XS, lengths=ON), LENGTHS_ARE.format(r"bool\[2,5\]", r".*`mask\.sum\(-1\)`")),
    (
        lambda: eqx.nn.Sequential([GRU5, GRU5])(XS[0]),
        "(?s)`xs` is a `tuple`.*`equinox.nn.Sequential`.*`eqx_grads.nn.Outputs`",
    ),
    (lambda: nn.Outputs(GRU_CELL), "(?s)it is a `GRUCell`.*`eqx_grads.nn.Recurrent`"),
]


def test_errors_of_calls():
    for call, match in ERRORS:
        with raises(match):
            call()


def test_state_of_a_cell():
    """The error speaks of the cell and its state, not of a step and a carry."""

    class Cell(eqx.Module):
        def __call__(self, x, state):
            return state[:1]

    layer = nn.Recurrent(Cell(), initial_state=jnp.zeros(2))
    with raises(
        r"(?s)The cell of `Recurrent` returned another state than it was given.\n"
        r"  it was given float..\[2\]\n  it returned float..\[1\]\n  in `Cell`"
    ) as info:
        layer(XS)
    assert not any(word in str(info.value) for word in ("carry", "`init`", "`step`"))
    pair = nn.Recurrent(Cell(), initial_state=(jnp.zeros(2), jnp.zeros(1)))
    with raises(
        r"(?s)it was given \(float..\[2\], float..\[1\]\)\n  it returned \(float..\[2\],"
    ):
        pair(XS)


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
