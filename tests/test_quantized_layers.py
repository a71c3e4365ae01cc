"""Quantization layers: values to the bit, gradients against plain autodiff and NumPy."""

import copy
import functools as ft
import io
import itertools

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from eqx_grads import RuleError, ste

from .helpers import assert_close


pytestmark = pytest.mark.x64


def raises(match):
    return pytest.raises(RuleError, match=match)


# ---------------------------------------------------------------- layers


def test_a_layer_like_another(getkey):
    """Files, `tree_at`, copies and the attributes of the layer inside."""
    make = lambda: nn.Quantized(eqx.nn.Linear(3, 2, key=getkey()), nn.LSQ(2), ste.round)
    layer, other = make(), make()
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, other), layer)
    assert eqx.tree_equal(copy.deepcopy(layer), layer)
    assert (layer.out_features, layer.weight is layer.layer.weight) == (2, True)
    weight = jnp.ones((2, 3))
    changed = eqx.tree_at(lambda layer: layer.weight, layer, weight)
    assert changed.layer.weight is weight
    assert changed.bias is layer.bias
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing


# ---------------------------------------------------------------- quantizers


def test_a_given_number_is_no_leaf(getkey):
    """So that weight decay leaves it."""
    x = jr.normal(getkey(), (6,))
    for number in (0.1, np.float32(0.25), 1):
        given = nn.FakeQuantize(4, scale=number)
        assert (jax.tree.leaves(given), given.constant) == ([], number)
        of_array = nn.FakeQuantize(4, scale=jnp.array(float(number)))
        np.testing.assert_array_equal(given(x), of_array(x))
    assert len(jax.tree.leaves(nn.FakeQuantize(4, scale=0.1, learn_scale=True))) == 1


# ---------------------------------------------------------------- the codebook


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int32"])
def test_indices_of_any_integers(dtype, getkey):
    vq = nn.VectorQuantizer(200, 2, key=getkey())
    indices = jnp.array([0, 100, 127], dtype)
    np.testing.assert_array_equal(vq.decode(indices), vq.codebook[np.array([0, 100, 127])])
    assert jnp.isnan(vq.decode(jnp.array([-1, 201]).astype(dtype))).all()


@pytest.mark.slow
def test_vectors_that_are_not_finite_are_left_out(getkey):
    key = getkey()
    z = jr.normal(getkey(), (6, 2), "float32")
    bad = jnp.array([[jnp.nan, 0.0], [jnp.inf, 1.0], [1.0, -jnp.inf]], "float32")
    mixed = jnp.concatenate([bad[:1], z[:3], bad[1:], z[3:]])
    make = ft.partial(nn.VectorQuantizer, 4, 2, ema=True, dtype="float32", decay=0.5)
    vq = make(key=key)
    got, expected = vq.updated(mixed), vq.updated(z)
    assert_close((got.codebook, got.usage), (expected.codebook, expected.usage), tolerance=1e-6)
    assert eqx.tree_equal(vq.updated(bad), vq)
    # Nor do they take the place of dead entries: here there are more of those than vectors.
    dying = make(dead_below=2.0, key=key)
    rows = {row.tobytes() for row in np.asarray(z[:2])}
    new = dying.updated(jnp.concatenate([bad, z[:2]]), key=getkey())
    assert {
        row.tobytes() for row in np.asarray(new.codebook)[np.asarray(new.usage) == 0.25]
    } == rows
    assert jnp.isfinite(new.codebook).all()
    assert eqx.tree_equal(dying.updated(bad, key=getkey()), dying)
    # What is finite in single precision may not be so in the codebook's.
    half = nn.VectorQuantizer(4, 2, ema=True, dtype="float16", key=key)
    assert eqx.tree_equal(half.updated(jnp.full((3, 2), 1e30, "float32")), half)


# ---------------------------------------------------------------- layers


@pytest.mark.thorough
def test_layers_of_any_type(getkey):
    """The layer does with the other weight what it does."""

    class Own(eqx.Module):
        weight: jax.Array

        def __call__(self, x, power, *, shift):
            return jnp.sum(self.weight * x) ** power + shift

    image, key = jr.normal(getkey(), (2, 5, 5)), getkey()
    options = {"stride": 2, "padding": 3, "padding_mode": "CIRCULAR", "groups": 2}
    for layer, args in (
        (eqx.nn.Conv2d(2, 4, 2, **options, key=key), (image,)),
        (eqx.nn.ConvTranspose2d(2, 4, 2, stride=2, key=key), (image,)),
        (eqx.nn.Linear("scalar", 3, key=key), (jnp.array(0.5),)),
        (eqx.nn.Embedding(5, 3, key=key), (jnp.array(2),)),
        (Own(jr.normal(key, (3, 2))), (jnp.ones((3, 2)), 2)),
    ):
        quantized = nn.Quantized(layer, nn.LSQ(2, channel_axis=0))
        weight = quantized.quantized_weight()
        assert all(len(np.unique(row)) <= 4 for row in np.asarray(weight))
        plain = eqx.tree_at(lambda layer: layer.weight, layer, weight)
        kwargs = {"shift": 3.0} if isinstance(layer, Own) else {}
        np.testing.assert_array_equal(quantized(*args, **kwargs), plain(*args, **kwargs))


# ---------------------------------------------------------------- whole models


def make_model(key):
    attention = eqx.nn.MultiheadAttention(2, 4, key=key)
    block = {"attention": attention, "norm": eqx.nn.LayerNorm(4)}
    feed = eqx.nn.MLP(4, 4, 8, 1, key=key)
    heads = {name: eqx.nn.Linear(4, 2, key=key) for name in "ab"}
    return {"blocks": [block, feed], "heads": heads}


def blank(make):
    """A model of ones, which takes no time to make."""
    shapes = eqx.filter_eval_shape(make, jr.key(0))
    of_ones = lambda x: jnp.ones(x.shape, x.dtype) if hasattr(x, "shape") else x
    return jax.tree.map(of_ones, shapes)


def left(report):
    return {row.path: row.note for row in report.left}


def test_rules():
    model = blank(make_model)
    new, report = nn.quantize_model(
        model,
        {
            "['heads']['a']": None,
            "['heads']": nn.LSQ(8, channel_axis=0),
            "['blocks'][0]*.output_proj": nn.Binary(),
            eqx.nn.MultiheadAttention: (nn.LSQ(4), nn.FakeQuantize(6)),
            "['blocks'][?].layers[0]": (ste.binary_sign, None),
            eqx.nn.LayerNorm: ste.round,
            "*": nn.Ternary(scale=False),
        },
    )
    attention, feed = "['blocks'][0]['attention']", "['blocks'][1].layers"
    rows = {row.path: (row.layer, row.weights, row.inputs) for row in report.swapped}
    assert rows == {
        **{
            f"{attention}.{name}_proj": ("Linear", "4 bits signed", "6 bits signed")
            for name in ("query", "key", "value")
        },
        f"{attention}.output_proj": ("Linear", "1 bit", ""),
        "['blocks'][0]['norm']": ("LayerNorm", "round", ""),
        f"{feed}[0]": ("Linear", "binary_sign", ""),
        f"{feed}[1]": ("Linear", "1.58 bits", ""),
        "['heads']['b']": ("Linear", "8 bits signed", ""),
    }
    assert left(report) == {"['heads']['a']": "rule 0, \"['heads']['a']\""}
    # What was not swapped is the object that it was.
    assert new["heads"]["a"] is model["heads"]["a"]
    assert new["heads"]["b"].weight is model["heads"]["b"].weight


def test_the_report_is_a_table():
    make = lambda key: [
        eqx.nn.Conv2d(1, 2, 3, key=key),
        eqx.nn.Linear(5, 6, key=key),
        eqx.nn.GRUCell(2, 3, use_bias=False, dtype="float32", key=key),
    ]
    model = blank(make)
    _, report = nn.quantize_model(model, [(eqx.nn.Conv, (nn.LSQ(2), nn.FakeQuantize(8)))])
    assert str(report) == (
        "swapped: 1\n"
        "  [0]  Conv2d  weights 2 bits signed  inputs 8 bits signed  (2, 1, 3, 3)\n"
        "left: 3\n"
        "  [1]            Linear   (6, 5)  no rule\n"
        "  [2].weight_ih  float32  (9, 2)  of no layer\n"
        "  [2].weight_hh  float32  (9, 3)  of no layer"
    )
    linear = model[1]
    new, report = nn.quantize_model(linear, {"*": nn.LSQ(2)})
    assert isinstance(new, nn.Quantized)
    assert "(the model)  Linear  weights" in str(report)
    again, report = nn.quantize_model([new, linear], {"*": nn.Binary()})
    assert again[0] is new
    assert left(report) == {"[0]": "quantized already"}


def test_shared_layers(getkey):
    linear = eqx.nn.Linear(2, 2, key=getkey())
    model = {"a": linear, "b": [linear], "c": linear}
    new, report = nn.quantize_model(model, {"*": nn.LSQ(2)})
    assert new["a"] is new["b"][0] is new["c"]
    assert [row.note for row in report.swapped] == [
        "",
        "shared with ['a']",
        "shared with ['a']",
    ]
    new, report = nn.quantize_model(model, {"['b']": nn.LSQ(2), "['c']": nn.LSQ(4)})
    assert new["a"] is linear
    was = "was shared with ['a'], and is not any more"
    assert [row.note for row in report.swapped] == [was, was]

    class Tied(eqx.Module):
        embedding: eqx.nn.Embedding
        linear: eqx.nn.Linear | nn.Quantized

    tied = Tied(eqx.nn.Embedding(3, 2, key=getkey()), eqx.nn.Linear(2, 3, key=getkey()))
    where, get = (lambda m: m.linear.weight), (lambda m: m.embedding.weight)
    quantized = nn.quantize_model(tied, {"linear": nn.LSQ(2, scale=0.1)})[0]
    model = eqx.nn.Shared(quantized, where, get)()
    weight = tied.embedding.weight
    assert_close(model.linear.quantized_weight(), nn.LSQ(2, scale=0.1)(weight), tolerance=2e-5)
    with raises(r"its weight is a `SharedNode`(?s:.)*before it is shared"):
        nn.quantize_model(eqx.nn.Shared(tied, where, get), {"*.linear": nn.LSQ(2)})


def test_one_path_syntax(getkey):
    """One report prints paths that another function takes: `layers[0]`, `heads['a']`."""
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


def test_a_layer_whose_scale_is_zero():
    linear = eqx.nn.Linear(4, 3, key=jr.key(0))
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
    linear = eqx.nn.Linear(4, 3, key=jr.key(0))
    with pytest.warns(UserWarning, match="`threshold` is 3.0(?s:.)*smaller"):
        nn.Quantized(linear, nn.Ternary(threshold=3.0))
    nn.Quantized(linear, nn.Ternary(threshold=3.0, scale=False))


# ---------------------------------------------------------------- inputs of quantized layers


@pytest.mark.slow
def test_inputs_of_a_model_with_quantized_weights(getkey):
    """Training goes on with quantized inputs: the weights and their scales stay."""
    model = eqx.nn.MLP(4, 2, 8, 1, key=getkey())
    weights = nn.LSQ(bits=3, channel_axis=0)
    inputs = nn.FakeQuantize(4, learn_scale=True)
    batch = jr.normal(getkey(), (20, 4))
    first, _ = nn.quantize_model(model, {eqx.nn.Linear: weights})
    trained = jax.tree.map(lambda x: 1.5 * x if eqx.is_inexact_array(x) else x, first)
    for which in (eqx.nn.Linear, nn.Quantized, "layers[*]", eqx.nn.MLP):
        got, report = nn.quantize_model(trained, {which: (None, inputs)}, calibrate=batch)
        assert [row.note for row in report.swapped] == 2 * ["weights as they were"]
        assert [row.weights for row in report.swapped] == 2 * ["3 bits signed"]
        assert [row.inputs for row in report.swapped] == 2 * ["4 bits signed"]
        for new, old in zip(got.layers, trained.layers, strict=True):
            assert new.weight is old.weight
            assert new.weight_quantizer.scale is old.weight_quantizer.scale
        # The inputs are those of the layers with quantized weights.
        hidden = jax.nn.relu(jax.vmap(trained.layers[0])(batch))
        for layer, x in zip(got.layers, (batch, hidden), strict=True):
            want = inputs.fit(x).scale
            np.testing.assert_allclose(layer.input_quantizer.scale, want, rtol=1e-5)
    assert trained.layers[0].input_quantizer is None


# ---------------------------------------------------------------- calibration

QUANTIZERS = (nn.LSQ(4), nn.LSQ(3, signed=False))


@pytest.mark.thorough
@pytest.mark.parametrize("scan", [False, True])
def test_calibration_of_ensembles_and_scans(scan, getkey):
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


def test_calibration_errors(getkey):
    model = {name: eqx.nn.Linear(3, 2, key=getkey()) for name in "ab"}
    call = lambda model, x: jax.vmap(model["a"])(x)
    some = {"calibrate": jnp.ones((6, 3)), "call": call}
    missing = r"(?s)no inputs to calibrate a layer.*`\['b'\]` is not called.*`call=lambda"
    with raises(missing):
        nn.quantize_model(model, {"*": QUANTIZERS}, **some)
    new, _ = nn.quantize_model(model, {"['b']": None, "*": QUANTIZERS}, **some)
    assert new["a"].input_quantizer.scale > 0
    for inputs in (nn.FakeQuantize(8), nn.FakeQuantize(8, scale=0.1)):
        with raises(r"nothing to calib(?s:.)*`learn_scale=True`. Without it,"):
            nn.quantize_model(model, {"*": (nn.LSQ(4), inputs)}, **some)
    groups = nn.FakeQuantize(8, learn_scale=True, group_size=3)  # had scales of all inputs
    with raises("(?s)can't fit an input quantizer with a `group_size`"):
        nn.quantize_model(model, {"['a']": (None, groups)}, **some)
    with raises("(?s)a `call`, and no batch"):
        nn.quantize_model(model, {"*": nn.LSQ(4)}, call=call)
    with raises(r"has no scale(?s:.)*`quantize_model\(..., calibrate=batch\)` fits"):
        nn.quantize_model(model, {"*": QUANTIZERS})


# ---------------------------------------------------------------- a codebook that is learned


def digits_autoencoder(key):
    """An encoder and a decoder of digits, and a quantizer with all options as they are."""
    keys = jr.split(key, 3)
    encoder = eqx.nn.MLP(64, 8, 64, 1, dtype="float32", key=keys[0])
    decoder = eqx.nn.MLP(8, 64, 64, 1, dtype="float32", key=keys[1])
    return encoder, decoder, nn.VectorQuantizer(32, 8, dtype="float32", key=keys[2])


@pytest.mark.slow
@pytest.mark.parametrize(("fitted", "keyed"), [(False, False), (False, True), (True, False)])
def test_vector_quantizer_does_not_collapse(fitted, keyed, getkey):
    """The perplexity on scikit-learn's digits is at least 20 of 32, even where no method is
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


# ---------------------------------------------------------------- errors

KEY = jr.key(0)
make_vq = ft.partial(nn.VectorQuantizer, 4, 3, key=KEY)
LSQ, RULE = nn.LSQ(2), {"*": nn.LSQ(2)}
LINEAR = eqx.nn.Linear(2, 3, key=KEY)
DONE = nn.Quantized(LINEAR, LSQ)
# Options that are refused: the error names the class and the option.
REFUSED = [
    *[(kind, "bits", x) for kind in (nn.FakeQuantize, nn.LSQ) for x in (2.5, None, True, 1)],
    *[(nn.LSQ, "group_size", x) for x in (0, 2.0, True)],
    *[(nn.FakeQuantize, "scale", x) for x in (0.0, np.inf, jnp.array([1.0, -2.0]))],
    *[(nn.LSQ, "gradient_scale", x) for x in ("a", -1, np.nan)],
    *[(nn.FSQ, "levels", x) for x in (8, (8, 2.5), (8, True), (1, 5))],
    *[(make_vq, name, x) for name in ("commitment", "dead_below") for x in (-1, "a", np.inf)],
    *[(make_vq, "decay", x) for x in (-0.1, None, 1.0)],
    *[(nn.Ternary, "threshold", x) for x in (-1, "median", np.nan)],
]
ERRORS = [
    (lambda: LSQ.fit([1.0, 2.0]), "`LSQ.fit` was given (?s:.)*`x` is list"),
    (lambda: nn.LSQ(4).encode(jnp.ones(3)), r"`LSQ` has no scale yet"),
    (lambda: nn.Ternary(scale=False).encode(jnp.array([jnp.nan])), "`Ternary.encode` .* NaN"),
    (lambda: nn.LSQ(4, scale=jnp.ones((4, 1))).encode(jnp.ones(3)), "does not broadcast"),
    (lambda: nn.Quantized(LINEAR, nn.LSQ), "`weight_quantizer` of `Quantized` is not a"),
    (lambda: nn.Quantized(LINEAR, jnp.sum)(jnp.ones(2)), "weight quantizer did not return"),
    (lambda: nn.Quantized(jnp.sin), "`layer` of `Quantized` has no array `weight`"),
    (lambda: nn.quantize_model({"a": LINEAR}, {"*": LSQ, "['a']": None}), "never used: rule 1"),
    (lambda: nn.quantize_model(LINEAR, {"*": 4}), "does not say how to quantize: rule 0"),
    (lambda: nn.quantize_model(LINEAR, {3: LSQ}), "which layers it is for: rule 0, 3"),
    (lambda: nn.quantize_model(LINEAR, LSQ), "not a dictionary or a list of pairs"),
    (lambda: nn.quantize_model([DONE], RULE), "that are quantized alr"),
    (
        lambda: nn.FSQ((3, 3, 3))(jnp.ones((2, 5))),
        "`FSQ` was given an array(?s:.)*and the size",
    ),
    (lambda: make_vq().decode(1.0), "`VectorQuantizer.decode` was given"),
]


@pytest.mark.usefixtures("without_type_checks")
def test_errors():
    for make, option, value in REFUSED:
        with raises(rf"`{getattr(make, 'func', make).__name__}`") as caught:
            make(**{option: value})
        assert option in str(caught.value)
    for call, match in ERRORS:
        with raises(match):
            call()


# ---------------------------------------------------------------- scales before training


@pytest.mark.parametrize(
    ("bits", "low", "high"), [(8, 0.14, 0.28), (4, 0.6, 1.2), (2, 1.5, 2.1)]
)
def test_errors_of_two_quantizers_before_training(bits, low, high):
    """Of normally distributed numbers, as the docstring of `LSQ` says."""
    for n in (64, 1_000_000):
        ratios = []
        for seed in range(10 if n < 1000 else 1):
            x = jr.normal(jr.key(seed), (n,), "float32")
            error = lambda q, x=x: jnp.linalg.norm(q.fit(x)(x) - x)
            ratios.append(error(nn.FakeQuantize(bits, learn_scale=True)) / error(nn.LSQ(bits)))
        assert low <= np.mean(np.array(ratios)) <= high


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_scale_of_lsq_is_in_range(dtype):
    """Where the numbers are the largest of the dtype, their sum and the scale are larger."""
    largest = float(jnp.finfo(dtype).max)
    for bits, size in itertools.product((2, 4, 8), (1.0, largest)):
        x = jnp.full((3, 1000), size, dtype)
        expected = min(2 * size / (2 ** (bits - 1) - 1) ** 0.5, largest)
        for options in ({}, {"channel_axis": 0}):
            scale = nn.LSQ(bits, **options).fit(x).scale
            assert scale.dtype == dtype
            scale = np.asarray(scale.astype(jnp.float32), np.float64)
            np.testing.assert_allclose(scale, expected, rtol=4 * float(jnp.finfo(dtype).eps))
