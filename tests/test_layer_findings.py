"""What outside trials found in layers and straight-through ops: L1, L7, L8, L9 and L10."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from eqx_grads import RuleError, ste, surrogates


KEY = jr.key(0)
FLOAT = jnp.zeros(()).dtype  # of single or double precision, as JAX is configured
X = np.array([0.3, -0.9, 2.0], FLOAT)
XS = np.ones((6, 3), FLOAT)
GATED = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
STACKS = {
    **{
        name: lambda layer=layer, **o: layer(3, 4, key=KEY, **o)
        for name, layer in GATED.items()
    },
    "MinGRU": lambda **o: nn.MinGRU(3, 4, key=KEY, **o),
    "MinLSTM": lambda **o: nn.MinLSTM(3, 4, key=KEY, **o),
    "LRU": lambda **o: nn.LRU(3, 4, 4, key=KEY, **o),
    "S5": lambda **o: nn.S5(3, 4, 4, key=KEY, **o),
}


# These would refuse some arguments first.
pytestmark = pytest.mark.usefixtures("without_type_checks")


def raises(match):
    return pytest.raises(RuleError, match=match)


# ---------------------------------------------------------------- L7


@pytest.mark.slow
def test_L7_numpy_integers_are_integers():
    four, int_ = np.int64(4), np.int32
    expected = ste.fake_quantize(X, 0.1, bits=4)
    assert np.array_equal(ste.fake_quantize(X, 0.1, bits=four), expected)
    assert np.array_equal(ste.lsq(X, 0.1, bits=four), ste.lsq(X, 0.1, bits=4))
    codes, index = ste.fsq(X, np.array([8, 5, 5]))
    assert np.array_equal(codes, ste.fsq(X, (8, 5, 5))[0])
    assert np.array_equal(ste.fsq_codebook([int_(8), 5, int_(5)])[index], codes)
    assert nn.FSQ(np.array([8, 5, 5])).num_codes == 200
    assert nn.LSQ(four).bits == nn.FakeQuantize(four, channel_axis=int_(0)).bits == 4
    assert nn.VectorQuantizer(four, int_(3), axis=int_(-1), key=KEY).codebook.shape == (4, 3)
    assert nn.RNNCell(int_(3), four, key=KEY)(X, jnp.zeros(4)).shape == (4,)
    shape_of = lambda layer: eqx.filter_eval_shape(layer, XS)[0].shape
    for layer in GATED.values():
        two = layer(int_(3), four, num_layers=np.int8(2), dtype="bfloat16", key=KEY)
        assert shape_of(two) == (6, 4)
    for layer in (nn.MinGRU, nn.MinLSTM):
        assert shape_of(layer(int_(3), four, dtype="bfloat16", key=KEY)) == (6, 4)
    for layer in (nn.LRU, nn.S5):
        assert shape_of(layer(int_(3), int_(2), four, dtype="bfloat16", key=KEY)) == (6, 2)
    recurrent = nn.Recurrent(eqx.nn.GRUCell(3, 4, key=KEY), checkpoint=int_(2))
    assert recurrent(XS, lengths=int_(3))[0].shape == (6, 4)
    options = dict.fromkeys(("bidirectional", "reverse", "use_bias", "time_major"), np.True_)
    assert shape_of(nn.GRU(3, 4, **options, key=KEY)) == (6, 8)


@pytest.mark.parametrize("true", [True, np.True_])
def test_L7_booleans_are_no_integers(true):
    calls = [
        lambda: ste.fake_quantize(X, 0.1, bits=true, signed=False),
        lambda: ste.lsq(X, 0.1, bits=true, signed=False),
        lambda: ste.fsq(X, (true, 5, 5)),
        lambda: ste.fake_quantize(X, true),
        lambda: ste.fake_quantize(X, 0.1, zero_point=true),
        lambda: nn.LSQ(true, signed=False),
        lambda: nn.FakeQuantize(channel_axis=true),
        lambda: nn.FSQ((8, 5), axis=true),
        lambda: nn.VectorQuantizer(true, 3, key=KEY),
        lambda: nn.VectorQuantizer(4, 3, decay=true, key=KEY),
        lambda: nn.RNNCell(3, true, key=KEY),
        lambda: nn.GRU(true, 4, key=KEY),
        lambda: nn.GRU(3, 4, num_layers=true, key=KEY),
        lambda: nn.GRU(3, 4, num_layers=2, dropout=true, key=KEY),
        lambda: nn.GRU(3, 4, key=KEY)(XS, lengths=true),
        lambda: nn.S5(3, 4, 4, blocks=true, key=KEY),
        lambda: nn.LRU(3, 4, 4, r_max=true, key=KEY),
        lambda: nn.Recurrent(eqx.nn.GRUCell(3, 4, key=KEY), checkpoint=true),
        lambda: eqg.clip_gradient_norm(X, 1.0, axis=true),
    ]
    for i, call in enumerate(calls):
        with raises("(not|can't)"):
            print(i, call())


@pytest.mark.parametrize("size", [0, -2])
def test_L7_sizes_of_a_cell(size):
    for sizes in ((3, size), (size, 3)):
        with raises(f"(?s)`RNNCell` was given a size that is not a positive.*_size` is {size}"):
            nn.RNNCell(*sizes, key=KEY)


@pytest.mark.parametrize("name", GATED)
def test_L7_complex_numbers(name):
    with raises(f"(?s)`dtype` of `{name}` is not a real floating one.*it is complex64"):
        STACKS[name](dtype=jnp.complex64)
    layer = STACKS[name]()
    with raises(f"(?s)`{name}` was given complex numbers.*`xs` is complex64"):
        layer(XS.astype("complex64"))
    state = jax.tree.map(lambda s: s.astype("complex64"), layer(XS)[1])
    with raises(f"(?s)`{name}` was given complex numbers.*`state` is complex64"):
        layer(XS, state)


# ---------------------------------------------------------------- L8


@pytest.mark.parametrize("name", STACKS)
def test_L8_options_of_stacks(name):
    make = STACKS[name]
    for dropout in (2.0, -0.1, np.nan, "0.5"):
        with raises(f"`dropout` of `{name}` is not a probability"):
            make(num_layers=2, dropout=dropout)
    with raises("(?s)a single layer.*Dropout is applied between two layers"):
        make(dropout=0.5)
    for option in ("bidirectional", "learn_initial_state", "reverse", "time_major"):
        with raises(f"(?s)`{option}` of `{name}` is not a bool.*it is 'no'"):
            make(**{option: "no"})
    if name in GATED:
        with raises("`use_bias` of"):
            make(use_bias=0)
    else:
        with raises(f"(?s)`{name}` was given an unknown `method`.*'fft'.*'associative'"):
            make(method="fft")


def test_L8_flags_of_spiking_layers():
    lif = lambda **o: nn.LIF(3, 4, 0.9, key=KEY, **o)
    for make, cell, option in (
        (lif, "LIFCell", "detach_reset"),
        (lif, "LIFCell", "recurrent"),
        (lif, "LIFCell", "use_bias"),
        (lif, "LIF", "learn_initial_state"),
        (lif, "LIF", "reverse"),
    ):
        with raises(f"(?s)`{option}` of `{cell}` is not a bool.*it is 'no'"):
            make(**{option: "no"})


def test_L8_flags_of_quantizers():
    vq = lambda **o: nn.VectorQuantizer(3, 4, key=KEY, **o)
    for make, option in (
        (vq, "ema"),
        (nn.LSQ, "signed"),
        (nn.FakeQuantize, "signed"),
        (nn.FakeQuantize, "narrow"),
        (nn.FakeQuantize, "learn_scale"),
        (nn.Binary, "scale"),
        (nn.Ternary, "scale"),
        (lambda **o: ste.fake_quantize(X, 0.1, **o), "signed"),
        (lambda **o: ste.fake_quantize(X, 0.1, **o), "narrow"),
        (lambda **o: ste.lsq(X, 0.1, **o), "signed"),
        (lambda **o: ste.gumbel_softmax(X, key=KEY, **o), "hard"),
        (lambda **o: ste.gumbel_sigmoid(X, key=KEY, **o), "hard"),
    ):
        with raises(f"(?s)`{option}` of .* is not a bool.*it is 'no'"):
            make(**{option: "no"})


def test_L8_zero_point_and_scale():
    shifted = ste.fake_quantize(X, 0.1, zero_point=8)
    assert np.array_equal(shifted, ste.fake_quantize(X, 0.1, zero_point=8.0))
    for zero_point in (300, -129, np.nan, np.inf, jnp.array(200), np.array([0.0, 0.0, 128.0])):
        with raises("(?s)a zero point that is no integer of its range.*from -128 to 127"):
            ste.fake_quantize(X, 0.1, zero_point=zero_point)
    for scale in (jnp.array(0.0), jnp.array([1.0, 1.0, -1.0]), jnp.array(np.nan), 0):
        with raises("The scale of `ste.fake_quantize` is not positive"):
            ste.fake_quantize(X, scale)
        with raises("The step of `ste.lsq` is not positive"):
            ste.lsq(X, scale)
    traced = jax.jit(lambda s, z: ste.fake_quantize(X, s, zero_point=z))(-0.1, 300)
    assert traced.shape == X.shape  # not looked at


def test_L8_ranges():
    with raises("(?s)`ste.clip` was given a `min` that exceeds `max`.*`min` is 2, `max` is 1"):
        ste.clip(X, 2, 1)
    with raises("(?s)not from zero to one.*the largest 2.0.*`jax.nn.sigmoid`"):
        ste.bernoulli(2.0, key=KEY)
    with raises("not from zero to one"):
        ste.bernoulli(jnp.array([0.5, -0.1]), key=KEY)
    assert ste.bernoulli(np.float32(1 + 2e-7), key=KEY) == 1.0  # rounding
    for progress in (-5, jnp.array([0.5, -0.5])):
        with raises("(?s)a negative progress.*the step divided by"):
            eqg.reversal_schedule(progress)
    for quantizer in (nn.LSQ(4), nn.FakeQuantize(4, learn_scale=True)):
        for wrong in (np.nan, np.inf):
            with raises("`.*.fit` was given nothing(?s:.)*numbers that are not finite"):
                quantizer.fit(jnp.array([1.0, wrong]))


def test_L8_no_numbers_and_no_functions():
    for make in (
        lambda: surrogates.gaussian("a"),
        lambda: surrogates.triangle(peak=None),
        lambda: surrogates.multi_gaussian(height="a"),
        lambda: surrogates.leaky(leak=True),
        lambda: ste.heaviside(X, at_zero="one"),
        lambda: ste.ternary(X, threshold=True),
        lambda: ste.clip(X, "0"),
        lambda: ste.gumbel_softmax(X, key=KEY, temperature="hot"),
        lambda: eqg.reversal_schedule("half"),
    ):
        with raises("is not a number"):
            make()


def test_L8_recurrent_and_lengths():
    cell = eqx.nn.GRUCell(3, 4, key=KEY)
    for checkpoint in (-1, 0, 2.0, "all"):
        with raises("was given a `checkpoint` that it does not know"):
            nn.Recurrent(cell, checkpoint=checkpoint)
    # Traced, a negative length counts as no step, as the docstring says.
    ys, last = jax.jit(lambda n: nn.GRU(3, 4, key=KEY)(XS, lengths=n))(-1)
    assert not np.any(ys)
    assert not np.any(last)


# ---------------------------------------------------------------- L9


@pytest.mark.parametrize("name", STACKS)
def test_L9_inputs_and_dtypes(name):
    with raises(f"(?s)`{name}` was given `xs` that are not an array of numbers.*`jnp.stack"):
        STACKS[name]()([[1.0, 2.0, 3.0]])
    for dtype in (int, "int8", bool, "double precision"):
        with raises(f"`dtype` of `{name}` is not a real floating one"):
            STACKS[name](dtype=dtype)


def test_L9_dtypes_of_other_layers():
    for make in (
        lambda **o: nn.RNNCell(3, 4, key=KEY, **o),
        lambda **o: nn.VectorQuantizer(3, 4, key=KEY, **o),
    ):
        for dtype in (jnp.int32, jnp.complex64, "double precision"):
            with raises("(?s)`dtype` of .* is not a real floating one.*such as `jnp.float32`"):
                make(dtype=dtype)
        assert jax.tree.leaves(make(dtype=jnp.float16))[0].dtype == jnp.float16


def test_L9_options_of_the_wrong_type():
    model = eqx.nn.Linear(3, 4, key=KEY)
    for rules in (nn.LSQ(4), "weight", [nn.LSQ(4)], None, 4):
        with raises(
            "(?s)`quantize_model` is not a dictionary or a list of pairs.*eqx.nn.Linear"
        ):
            nn.quantize_model(model, rules)
    for option in ("r_min", "r_max", "max_phase"):
        with raises(f"(?s)`{option}` of `LRU` is not a number.*it is '1'"):
            STACKS["LRU"](**{option: "1"})
    for option in ("min_step", "max_step"):
        with raises(f"`{option}` of `S5` is not a number"):
            STACKS["S5"](**{option: "1"})
    for name in ("LRU", "S5"):
        with raises(f"(?s)`activation` of `{name}` is not a function.*and not its name"):
            STACKS[name](activation="gelu")
    with raises("The gradient scale of `ste.lsq` is not a number"):
        ste.lsq(X, 0.1, gradient_scale="auto")
    with raises("`cell` of `Recurrent` is not a function"):
        nn.Recurrent(eqx.nn.GRUCell)
    with raises("(?s)axis that is not an integer.*it is 'batch'|`axis` is 'batch'"):
        eqg.clip_gradient_norm(X, 1.0, axis="batch")


def test_L9_state_of_a_cell():
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


def test_L9_with_gradient_of():
    soft = lambda x: x
    with raises(r"`with_gradient_of` was given a surrogate.*\n.*value of `zeros_like`") as info:
        eqg.with_gradient_of(jnp.zeros_like, lambda x: jnp.stack([x, x]))(2.0)
    with raises("`with_gradient_of` was given .* of different structure"):
        eqg.with_gradient_of(lambda x: (x, x), soft)(2.0)
    assert "replace_gradient" not in str(info.value)


# ---------------------------------------------------------------- L1


class Network(eqx.Module):
    rnn: nn.GRU | nn.LSTM | nn.RNN
    readout: eqx.nn.Linear

    def __call__(self, xs):
        ys, _ = self.rnn(xs)
        return self.readout(ys[-1])


def norms_of_states(cell, readout, xs):
    """The gradient of the loss with respect to each state, by differentiating a plain loop with
    respect to something that is added to the states."""
    zero = jnp.zeros(4)
    state = (zero, zero) if isinstance(cell, eqx.nn.LSTMCell) else zero
    added = [jax.tree.map(jnp.zeros_like, state) for _ in xs]

    def loss(added):
        h = state
        for x, extra in zip(xs, added, strict=True):
            h = jax.tree.map(jnp.add, cell(x, h), extra)
        return jnp.sum(readout(jax.tree.leaves(h)[0]) ** 2)

    grads = jax.grad(loss)(added)
    return [np.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grad))) for grad in grads]


def loss_of(network, xs):
    return jnp.sum(network(xs) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_L1_gradient_flow_of_recurrent_layers(name, getkey):
    network = Network(GATED[name](3, 4, key=getkey()), eqx.nn.Linear(4, 2, key=getkey()))
    xs = jr.normal(getkey(), (6, 3))
    want = norms_of_states(network.rnn.cells[0][0], network.readout, xs)
    flow = eqg.gradient_flow(loss_of, network, xs)
    assert list(flow) == ["rnn", "readout"]
    assert flow["readout"].shape == (1,)
    np.testing.assert_allclose(flow["rnn"], want, rtol=1e-5)
    (chosen,) = eqg.gradient_flow(loss_of, network, xs, where=lambda m: m.rnn).items()
    assert chosen[0] == "rnn"
    np.testing.assert_array_equal(chosen[1], flow["rnn"])
    # A model that is only such a layer, in half precision, with a batch and a state that is
    # learned.
    layer = GATED[name](3, 4, dtype="bfloat16", learn_initial_state=True, key=getkey())
    batch = jnp.stack([xs, xs])
    (norms,) = eqg.gradient_flow(lambda m: jnp.sum(m(batch)[0]), layer).values()
    assert norms.shape == (6,)
    assert np.all(norms > 0)


@pytest.mark.slow
def test_L1_several_cells(getkey):
    layer = nn.GRU(3, 4, num_layers=2, bidirectional=True, reverse=True, key=getkey())
    network = Network(layer, eqx.nn.Linear(8, 2, key=getkey()))
    xs = jr.normal(getkey(), (2, 6, 3))
    loss = lambda network: jnp.sum(network.rnn(xs, lengths=[6, 2])[0] ** 2)
    flow = eqg.gradient_flow(loss, network, where=lambda m: m.rnn)
    assert list(flow) == [f"rnn.cells[{i}][{j}]" for i in range(2) for j in range(2)]
    assert all(norms.shape == (6,) for norms in flow.values())
    (second,) = eqg.gradient_flow(loss, network, where=lambda m: m.rnn.cells[1][1]).values()
    np.testing.assert_array_equal(second, flow["rnn.cells[1][1]"])


# ---------------------------------------------------------------- L10

# Recorded in double precision from the code of the paper's authors (arXiv 2309.15505, appendix
# A.1; the Colab `fsq/fsq.ipynb` of google-research/google-research). The first row of the first
# example is that of the Colab. Some inputs are close to a border between two levels.
FSQ_OF_THE_AUTHORS = {
    (3, 5, 4): {
        "z": [[0.25, 0.6, -7], [-1.3, 0.3, 0.9], [0.549, 1.9, 0.0], [0.551, -1.2, 0.2]],
        "codes": [[0.0, 0.5, -1.0], [-1.0, 0.5, 0.5], [0.0, 1.0, 0.0], [1.0, -1.0, 0.0]],
        "indices": [10, 54, 43, 32],
        "gradient": [
            [0.9390748339575716, 0.7108661848246354, 4.984701623911292e-06],
            [0.25717576350639115, 0.9142218248648027, 0.21130582192635694],
            [0.7494793610686304, 0.08552431374972705, 0.6659761677912085],
            [0.7479803442479293, 0.3047149762112016, 0.5634418463904769],
        ],
    },
    (8, 6, 2): {
        "z": [[0.0, 0.0, 0.0], [-0.15, 2.2, -0.7], [3.5, -0.6, -0.5], [4.5, 9.0, 0.4]],
        "codes": [
            [0.0, 0.0, 0.0],
            [-0.25, 2 / 3, 0.0],
            [0.75, -1 / 3, 0.0],
            [0.75, 2 / 3, 0.0],
        ],
        "indices": [76, 91, 71, 95],
        "gradient": [
            [0.856250985529547, 0.799140541869799, 0.08079702784535976],
            [0.8740933528600072, 0.026805136257621938, 0.2570533388766455],
            [0.0023873523231910344, 0.7138955746291146, 0.19092195604726386],
            [0.00032347509673705716, 3.379798463268001e-08, 0.0380533729486708],
        ],
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("levels", FSQ_OF_THE_AUTHORS)
def test_L10_fsq_is_that_of_the_paper(levels):
    want = FSQ_OF_THE_AUTHORS[levels]
    with jax.enable_x64(True):
        z = jnp.array(want["z"], jnp.float64)
        codes, indices = ste.fsq(z, levels)
        np.testing.assert_allclose(codes, want["codes"], rtol=1e-15)
        np.testing.assert_array_equal(indices, want["indices"])
        gradient = jax.grad(lambda z: jnp.sum(nn.FSQ(levels)(z)))(z)
        np.testing.assert_allclose(gradient, want["gradient"], rtol=1e-9)


def test_L10_one_path_syntax(getkey):
    """What one report prints is what another function takes: `layers[0]`, `heads['a']`."""
    model = eqx.nn.MLP(3, 2, 4, 1, key=getkey())
    loss = lambda model, x: jnp.sum(model(x))
    paths = list(eqg.gradient_flow(loss, model, jnp.ones(3)))
    assert paths == ["layers[0]", "layers[1]"]
    _, report = nn.quantize_model(model, dict.fromkeys(paths, nn.LSQ(2)))
    assert [row.path for row in report.swapped] == paths
    tree = {"a": [model], "[0]": model.layers[0]}
    _, report = nn.quantize_model(tree, {"['a'][0].layers[?]": nn.LSQ(2), "*": nn.LSQ(4)})
    rows = {row.path: row.weights for row in report.swapped}
    arrays = eqx.filter(tree, lambda leaf: isinstance(leaf, jax.Array) and leaf.ndim == 2)
    keystr = lambda path: jax.tree_util.keystr(path).removesuffix(".weight")
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    assert {keystr(path) for path, _ in leaves} == set(rows)
    assert rows["['[0]']"] == "4 bits signed"
    with raises(r"(?s)matches no layer: rule 0, 'layers.0'.*`layers\[0\]`.*as in Python"):
        nn.quantize_model(model, {"layers.0": nn.LSQ(2)})


def digits_autoencoder(key):
    """An encoder and a decoder of digits, and a quantizer with all options as they are."""
    keys = jr.split(key, 3)
    encoder = eqx.nn.MLP(64, 8, 64, 1, dtype="float32", key=keys[0])
    decoder = eqx.nn.MLP(8, 64, 64, 1, dtype="float32", key=keys[1])
    return encoder, decoder, nn.VectorQuantizer(32, 8, dtype="float32", key=keys[2])


@pytest.mark.slow
@pytest.mark.parametrize(("fitted", "keyed"), [(False, False), (False, True), (True, False)])
def test_L10_vector_quantizer_does_not_collapse(fitted, keyed, getkey):
    """The perplexity on scikit-learn's digits is at least 20 of 32, also where no method is
    given a key."""
    from sklearn.datasets import load_digits

    images = jnp.asarray(load_digits(return_X_y=True)[0] / 16, "float32")
    model = digits_autoencoder(getkey())
    if fitted:
        encoder, decoder, quantizer = model
        quantizer = quantizer.fit(jax.vmap(encoder)(images[:512]))
        assert quantizer.perplexity() > 20
        model = encoder, decoder, quantizer
    optimizer = optax.adam(1e-3)

    def loss(model, x):
        encoder, decoder, quantizer = model
        z = jax.vmap(encoder)(x)
        value, _, codebook_loss, commitment_loss = quantizer.quantize(z)
        error = jnp.sum((jax.vmap(decoder)(value) - x) ** 2) / len(x)
        return error + 8 * (codebook_loss + commitment_loss), z

    def step(carry, key):
        arrays, state = carry
        key1, key2 = jr.split(key)
        x = images[jr.randint(key1, (64,), 0, len(images))]
        grads, z = eqx.filter_grad(loss, has_aux=True)(eqx.combine(arrays, static), x)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state)
        *networks, quantizer = eqx.combine(eqx.apply_updates(arrays, updates), static)
        model = (*networks, quantizer.updated(z, key=key2 if keyed else None))
        return (eqx.filter(model, eqx.is_inexact_array), state), None

    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys)[0])
    arrays, _ = run((arrays, optimizer.init(arrays)), jr.split(getkey(), 1000))
    encoder, _, quantizer = eqx.combine(arrays, static)
    share = np.bincount(quantizer.quantize(jax.vmap(encoder)(images)).indices, minlength=32)
    share = share[share > 0] / len(images)
    assert np.exp(-np.sum(share * np.log(share))) >= 20
    assert quantizer.perplexity() >= 20


@pytest.mark.slow
def test_L10_fit_of_a_codebook(getkey):
    """Each entry is the mean of the vectors that are nearest to it, wherever the data are."""
    centers = 100 + 10 * jr.normal(getkey(), (4, 3), "float32")
    z = jnp.repeat(centers, 50, 0) + 0.1 * jr.normal(getkey(), (200, 3), "float32")
    z = z.at[7].set(jnp.nan)
    new = nn.VectorQuantizer(4, 3, dtype="float32", axis=-2, key=getkey())
    vq = eqx.filter_jit(lambda vq, z, key: vq.fit(z, key=key))(new, z.T, getkey())
    kept = np.delete(np.asarray(z, float), 7, 0)
    distances = ((kept[:, None] - np.asarray(vq.codebook, float)) ** 2).sum(-1)
    index = distances.argmin(1)
    for entry, usage, i in zip(vq.codebook, vq.usage, range(4), strict=True):
        np.testing.assert_allclose(usage, np.mean(index == i), rtol=1e-5)
        if usage > 0:
            np.testing.assert_allclose(entry, kept[index == i].mean(0), rtol=1e-5)
    assert np.sum(vq.usage > 0) > 1
    assert eqx.tree_equal(new.fit(jnp.zeros((3, 0)), key=getkey()), new)
    nothing = new.fit(jnp.full((3, 5), jnp.nan), key=getkey())
    np.testing.assert_array_equal(nothing.codebook, new.codebook)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reverse"), [("GRU", False), ("GRU", True), ("LSTM", False), ("LRU", True)]
)
def test_L10_recurrent_layers_in_sequential(name, reverse, getkey):
    layer = STACKS[name](bidirectional=True, reverse=reverse)
    linear = eqx.nn.Linear(8, 2, key=getkey())
    xs = jr.normal(getkey(), (6, 3))
    model = eqx.nn.Sequential([nn.Outputs(layer, last=True), linear])
    ys, _ = layer(xs)
    first, second = (0, -1) if reverse else (-1, 0)
    last = jnp.concatenate([ys[first, :4], ys[second, 4:]])
    np.testing.assert_allclose(model(xs), linear(last), rtol=1e-6)
    np.testing.assert_array_equal(nn.Outputs(layer)(xs), ys)
    batch = jnp.stack([xs, 2 * xs])
    one_by_one = jnp.stack([model[0](x) for x in batch])
    np.testing.assert_allclose(model[0](batch), one_by_one, rtol=1e-5, atol=1e-6)
    grads = eqx.filter_grad(lambda model: jnp.sum(model(xs)))(model)
    assert any(jnp.any(g != 0) for g in jax.tree.leaves(grads[0]))


@pytest.mark.parametrize("time_major", [False, True])
def test_L10_the_last_outputs_of_a_batch(time_major, getkey):
    layer = nn.GRU(3, 4, time_major=time_major, key=getkey())
    xs = jr.normal(getkey(), (6, 2, 3) if time_major else (2, 6, 3))
    ys, _ = layer(xs)
    last = nn.Outputs(layer, last=True)(xs)
    np.testing.assert_array_equal(last, ys[-1] if time_major else ys[:, -1])


def test_L10_errors_name_the_adapter(getkey):
    stack = eqx.nn.Sequential([nn.GRU(3, 4, key=getkey()), nn.GRU(4, 4, key=getkey())])
    with raises("(?s)`xs` is a `tuple`.*`equinox.nn.Sequential`.*`eqx_grads.nn.Outputs`"):
        stack(XS)
    with raises("(?s)not a recurrent layer.*it is a `GRUCell`.*`eqx_grads.nn.Recurrent`"):
        nn.Outputs(eqx.nn.GRUCell(3, 4, key=getkey()))


def projected_lstm(weights, xs, h, c):
    """The formulas of `torch.nn.LSTM` with `proj_size`, in NumPy and double precision."""
    w_ih, w_hh, bias, w_hr = (np.asarray(w, np.float64) for w in weights)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    hs = []
    for x in np.asarray(xs, np.float64):
        i, f, g, o = np.split(w_ih @ x + w_hh @ h + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = w_hr @ (sigmoid(o) * np.tanh(c))
        hs.append(h)
    return np.stack(hs), h, c


@pytest.mark.slow
def test_L10_proj_size(getkey):
    with jax.enable_x64(True):
        lstm = nn.LSTM(3, 5, proj_size=2, dtype="float64", key=getkey())
        xs = jr.normal(getkey(), (7, 3), "float64")
        cell = lstm.cells[0][0]
        weights = (cell.weight_ih, cell.weight_hh, cell.bias, cell.weight_hr)
        assert [w.shape for w in weights] == [(20, 3), (20, 2), (20,), (2, 5)]
        ys, (h, c) = lstm(xs)
        want = projected_lstm(weights, xs, np.zeros(2), np.zeros(5))
        for got, expected in zip((ys, h, c), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12)
        # Finite differences of these formulas.
        grads = eqx.filter_grad(lambda lstm: jnp.sum(jnp.sin(lstm(xs)[0])))(lstm).cells[0][0]
        loss = lambda *w: np.sum(np.sin(projected_lstm(w, xs, np.zeros(2), np.zeros(5))[0]))
        for k, name in enumerate(("weight_ih", "weight_hh", "bias", "weight_hr")):
            direction = np.asarray(jr.normal(getkey(), weights[k].shape, "float64"))
            moved = lambda h, k=k, d=direction: [
                w + h * d if j == k else w for j, w in enumerate(weights)
            ]
            slope = (loss(*moved(1e-6)) - loss(*moved(-1e-6))) / 2e-6
            got = np.sum(np.asarray(getattr(grads, name)) * direction)
            np.testing.assert_allclose(got, slope, rtol=1e-7)
        # With the identity for a projection, it is the layer whose pass is written by hand.
        plain = nn.LSTM(3, 4, dtype="float64", key=getkey())
        names = ("weight_ih", "weight_hh", "bias")
        parts = lambda m: [getattr(m.cells[0][0], name) for name in names]
        projected = eqx.tree_at(
            lambda m: [*parts(m), m.cells[0][0].weight_hr],
            nn.LSTM(3, 4, proj_size=3, dtype="float64", key=getkey()),
            [*parts(plain), jnp.eye(4, dtype="float64")],
        )
        batch = jr.normal(getkey(), (2, 6, 3), "float64")
        loss = lambda m: jnp.sum(jnp.sin(m(batch, lengths=[6, 2])[0]))
        value, grad = eqx.filter_value_and_grad(loss)(projected)
        want_value, want_grad = eqx.filter_value_and_grad(loss)(plain)
        np.testing.assert_allclose(value, want_value, rtol=1e-12)
        for got, expected in zip(parts(grad), parts(want_grad), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-14)


def _example_by_example(layer, xs, state, *, lengths):
    call = lambda x, s, n: layer(x, s, lengths=n)
    return jax.vmap(call, (0, 0, None if lengths is None else 0))(xs, state, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_L10_proj_size_against_autodiff_of_its_cell(reverse, getkey):
    """In two chunks, with lengths and a state, for a batch and under `vmap`."""
    with jax.enable_x64(True):
        lstm = nn.LSTM(3, 5, proj_size=2, reverse=reverse, dtype="float64", key=getkey())
        zero = jnp.zeros(2, "float64"), jnp.zeros(5, "float64")
        loop = nn.Recurrent(
            lstm.cells[0][0], initial_state=zero, checkpoint=None, reverse=reverse
        )
        xs = jr.normal(getkey(), (4, 130, 3), "float64")
        state = tuple(jr.normal(getkey(), (4, n), "float64") for n in (2, 5))

        def loss(args, call):
            layer, xs, state = args
            ys, (h, c) = call(layer, xs, state)
            return jnp.sum(jnp.sin(ys)) + jnp.sum(jnp.cos(h)) + jnp.sum(c**2)

        grad = lambda layer, call: jax.tree.leaves(
            eqx.filter_jit(eqx.filter_value_and_grad(loss))((layer, xs, state), call)
        )
        for lengths in (None, jnp.array([130, 0, 91, 7])):
            batch = lambda layer, xs, state, n=lengths: layer(xs, state, lengths=n)
            want = [x for x in grad(loop, batch) if x.shape not in ((2,), (5,))]
            got = grad(lstm, batch)
            each = ft.partial(_example_by_example, lengths=lengths)
            for found in (got, grad(lstm, each)):
                assert len(found) == len(want)
                for a, b in zip(found, want, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        # Frozen weights: the gradients of the others are the same.
        of_out = lambda m: m.cells[0][0].weight_hr
        frozen = lambda w: loss((eqx.tree_at(of_out, lstm, w), xs, state), batch)
        np.testing.assert_allclose(jax.jit(jax.grad(frozen))(of_out(lstm)), got[4], rtol=1e-9)


@pytest.mark.slow
def test_L10_proj_size_in_stacks_and_errors(getkey):
    lstm = nn.LSTM(3, 5, proj_size=2, num_layers=2, bidirectional=True, key=getkey())
    ys, (h, c) = lstm(jnp.ones((4, 6, 3)), lengths=[6, 0, 3, 1])
    assert ys.shape == (4, 6, 4)
    assert h.shape == (4, 4, 2)
    assert c.shape == (4, 4, 5)
    assert lstm.cells[1][0].weight_ih.shape == (20, 4)
    learned = nn.LSTM(3, 5, proj_size=2, learn_initial_state=True, key=getkey())
    assert jax.tree.map(jnp.shape, learned.initial_state) == ((2,), (5,))
    flow = eqg.gradient_flow(lambda m: jnp.sum(m(jnp.ones((6, 3)))[0]), learned)
    assert [norms.shape for norms in flow.values()] == [(6,)]
    for size in (5, 6):
        with raises(f"(?s)a projection that is not smaller.*`proj_size` is {size}"):
            nn.LSTM(3, 5, proj_size=size, key=getkey())
    for size in (0, True, 2.0):
        with raises("(?s)`LSTM` was given a size that is not.*`proj_size` is"):
            nn.LSTM(3, 5, proj_size=size, key=getkey())
    for layer in (nn.GRU, nn.RNN):
        with pytest.raises(TypeError, match="unexpected keyword argument 'proj_size'"):
            layer(3, 5, proj_size=2, key=getkey())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LRU", "S5"])
def test_L10_half_precision(name, getkey):
    """What half precision loses is the rounding of weights, inputs and outputs, 2^-9 each: the
    recurrence and its parameters are in single precision."""
    make = {"LRU": nn.LRU, "S5": nn.S5}[name]
    half = make(8, 8, 32, dtype="bfloat16", key=getkey())
    xs = jr.normal(getkey(), (1000, 8)).astype("bfloat16")
    widen = lambda x: x.astype("float32") if eqx.is_inexact_array(x) else x
    ys, expected = half(xs)[0], jax.tree.map(widen, half)(widen(xs))[0]
    assert ys.dtype == "bfloat16"
    error = lambda a, b: float(jnp.linalg.norm(widen(a) - widen(b)) / jnp.linalg.norm(widen(b)))
    assert error(ys, expected) < 3e-3
    dynamics = [x for x in jax.tree.leaves(half.cells) if x.dtype == "float32"]
    assert len(dynamics) == 3
    # A layer in single precision whose weights alone are rounded.
    single = make(8, 8, 32, dtype="float32", key=getkey())
    parts = lambda m: [getattr(m.cells[0][0], n) for n in ("weight_in", "weight_out", "skip")]
    rounded = eqx.tree_at(parts, single, [x.astype("bfloat16") for x in parts(single)])
    assert error(rounded(xs)[0], single(widen(xs))[0]) < 5e-3


@pytest.mark.slow
def test_L10_proj_size_is_that_of_torch():
    """Recorded from `torch.nn.LSTM(2, 4, proj_size=3)` of PyTorch 2 in double precision."""
    draw = np.random.RandomState(7).standard_normal
    w_ih, w_hh, b_ih, b_hh, w_hr = map(draw, [(16, 2), (16, 3), (16,), (16,), (3, 4)])
    ys = [
        [0.3384133064023832, 0.04918305343697081, -0.0630492750576906],
        [0.18826451143541661, -0.06416756709079963, 0.029219897245683593],
        [0.22309834418461358, -0.16683155656572413, 0.007550973825246679],
    ]
    c = [1.5064035084155964, 0.013719158197256429, 1.0644478014722067, 0.12354295184448302]
    ct_xs = [
        [-0.07014074097142953, -0.2381207433776968],
        [-0.149405761460927, 0.1527412634929214],
        [-0.30042049916533303, 0.15563552975739658],
    ]
    ct_w_hr = [
        [1.0902800749089112, -0.038381428337899086, 0.5614274609879132, 0.09977867345648506],
        [1.7254158628321306, -0.09183209871837751, 0.8439114529639408, 0.17239705081355047],
        [1.7336352177745091, -0.08855705731948904, 0.8678155669241846, 0.17445610973588194],
    ]
    xs = draw((1, 3, 2))[0]
    with jax.enable_x64(True):
        lstm = nn.LSTM(2, 4, proj_size=3, dtype="float64", key=KEY)
        names = ("weight_ih", "weight_hh", "bias", "weight_hr")
        parts = lambda m: [getattr(m.cells[0][0], name) for name in names]
        lstm = eqx.tree_at(parts, lstm, list(map(jnp.array, (w_ih, w_hh, b_ih + b_hh, w_hr))))
        got, (h, last) = lstm(jnp.array(xs))
        np.testing.assert_allclose(got, ys, rtol=1e-12)
        np.testing.assert_allclose(h, ys[-1], rtol=1e-12)
        np.testing.assert_allclose(last, c, rtol=1e-12)
        loss = lambda args: jnp.sum(jnp.sin(args[0](args[1])[0]))
        grad, grad_xs = eqx.filter_grad(loss)((lstm, jnp.array(xs)))
        np.testing.assert_allclose(grad_xs, ct_xs, rtol=1e-10)
        np.testing.assert_allclose(grad.cells[0][0].weight_hr, ct_w_hr, rtol=1e-10)


# ---------------------------------------------------------------- L10: calibration


QUANTIZERS = (nn.LSQ(4), nn.LSQ(3, signed=False))


@pytest.mark.slow
def test_L10_calibration(getkey):
    """The scales are those of quantizers fitted by hand to the inputs of each layer."""
    keys = jr.split(getkey(), 3)
    first, second = eqx.nn.Conv2d(1, 2, 3, key=keys[0]), eqx.nn.Linear(32, 5, key=keys[1])
    third = eqx.nn.Linear(5, 3, key=keys[2])
    relu = eqx.nn.Lambda(jax.nn.relu)
    dropout = eqx.nn.Dropout(0.5)
    layers = [first, relu, eqx.nn.Lambda(jnp.ravel), second, relu, dropout, third]
    model = eqx.nn.Sequential(layers)
    images = jr.uniform(getkey(), (20, 1, 6, 6))
    rules = {
        eqx.nn.Conv2d: (nn.LSQ(4), nn.FakeQuantize(8, learn_scale=True)),
        "layers[3]": (nn.LSQ(4), nn.LSQ(3, signed=False, channel_axis=0)),
        eqx.nn.Linear: QUANTIZERS,
    }
    quantized, report = nn.quantize_model(model, rules, calibrate=images)
    assert [row.inputs for row in report.swapped] == ["8 bits signed", *2 * ["3 bits unsigned"]]
    one = jax.nn.relu(jax.vmap(first)(images)).reshape(20, -1)
    two = jax.nn.relu(jax.vmap(second)(one))
    scale = lambda i: quantized.layers[i].input_quantizer.scale
    np.testing.assert_allclose(scale(0), np.max(np.abs(images)) / 127, rtol=1e-6)
    np.testing.assert_allclose(scale(3), 2 * np.mean(np.abs(one), 0) / 7**0.5, rtol=1e-5)
    np.testing.assert_allclose(scale(6), 2 * np.mean(np.abs(two)) / 7**0.5, rtol=1e-5)
    # The weights are those without calibration, and the original is what it was.
    assert quantized.layers[3].weight is second.weight
    assert model.layers[0] is first
    outputs = jax.vmap(eqx.nn.inference_mode(quantized))(images)
    grads = eqx.filter_grad(lambda m: jnp.sum(eqx.nn.inference_mode(m)(images[0])))(quantized)
    assert outputs.shape == (20, 3)
    assert grads.layers[6].input_quantizer.scale.shape == ()


@pytest.mark.thorough
@pytest.mark.parametrize("scan", [False, True])
def test_L10_calibration_of_ensembles_and_scans(scan, getkey):
    """Each member of an ensemble, and each layer of a scan over layers, has its own scale."""
    x = jnp.abs(jr.normal(getkey(), (10, 4)))  # `QUANTIZERS` are unsigned
    mlp = eqx.nn.MLP(4, 2, 4, 3, activation=jax.nn.softplus, scan=scan, key=getkey())
    new, _ = nn.quantize_model(mlp, {"*": QUANTIZERS}, calibrate=x)
    got = np.concatenate([np.ravel(layer.input_quantizer.scale) for layer in new.layers])
    layers = []
    for layer in mlp.layers:
        if layer.weight.ndim == 2:
            layers.append((layer.weight, layer.bias))
        else:
            layers.extend(zip(layer.weight, layer.bias, strict=True))
    want, h = [], x
    for weight, bias in layers:
        want.append(2 * np.mean(np.abs(h)) / 7**0.5)
        h = jax.nn.softplus(h @ weight.T + bias[None])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert new(x[0]).shape == (2,)
    members = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 3, key=key))(jr.split(getkey(), 2))
    scaled = jnp.stack([x, 3 * x], 1)  # one input for each member
    call = lambda model, x: jax.vmap(eqx.filter_vmap(lambda m, x: m(x)), (None, 0))(model, x)
    new, _ = nn.quantize_model(members, {"*": QUANTIZERS}, calibrate=scaled, call=call)
    base = 2 * np.mean(np.abs(x)) / 7**0.5
    np.testing.assert_allclose(new.input_quantizer.scale, [base, 3 * base], rtol=1e-5)


def test_L10_calibration_errors(getkey):
    model = {name: eqx.nn.Linear(3, 2, key=getkey()) for name in "ab"}
    call = lambda model, x: jax.vmap(model["a"])(x)
    some = {"calibrate": XS, "call": call}
    missing = r"(?s)no inputs to calibrate a layer.*`\['b'\]` is not called.*`call=lambda"
    with raises(missing):
        nn.quantize_model(model, {"*": QUANTIZERS}, **some)
    new, _ = nn.quantize_model(model, {"['b']": None, "*": QUANTIZERS}, **some)
    assert new["a"].input_quantizer.scale > 0
    for inputs in (nn.FakeQuantize(8), nn.FakeQuantize(8, scale=0.1)):
        with raises(r"nothing to calib(?s:.)*`learn_scale=True`. Without it,"):
            nn.quantize_model(model, {"*": (nn.LSQ(4), inputs)}, **some)
    with raises("(?s)a `call`, and no batch"):
        nn.quantize_model(model, {"*": nn.LSQ(4)}, call=call)
    with raises(r"has no scale(?s:.)*`quantize_model\(..., calibrate=batch\)` fits"):
        nn.quantize_model(model, {"*": QUANTIZERS})
