"""Quantized layers and models, and their integers: what is swapped, fitted, stored and read."""

import copy
import functools as ft
import io
import itertools

import equinox as eqx
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError, ste

from .helpers import assert_close, quick_only


pytestmark = pytest.mark.x64
KEY = jr.key(0)


def raises(match):
    return pytest.raises(RuleError, match=match)


def saved(model, like):
    """A model written to a file, and read into another one."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


def equal_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    return got.dtype == want.dtype and got.tobytes() == want.tobytes()


# ---------------------------------------------------------------- layers


class Weighted(eqx.Module):
    weight: jax.Array

    def __call__(self, x, power=1, *, shift=0.0):
        return jnp.sum(self.weight * x) ** power + shift


def test_a_layer_like_another(getkey):
    """Files, `tree_at`, copies and the attributes of the layer inside."""
    make = lambda: nn.Quantized(eqx.nn.Linear(3, 2, key=getkey()), nn.LSQ(2), ste.round)
    layer = make()
    assert eqx.tree_equal(saved(layer, make()), layer)
    assert eqx.tree_equal(copy.deepcopy(layer), layer)
    assert (layer.out_features, layer.weight is layer.layer.weight) == (2, True)
    changed = eqx.tree_at(lambda layer: layer.weight, layer, jnp.ones((2, 3)))
    assert np.all(changed.layer.weight == 1)
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing
    # The layer does with the other weight what it does.
    weighted = nn.Quantized(Weighted(jnp.array([0.9, 2.2])), ste.round)
    assert weighted(jnp.array([1.0, 3.0]), 2, shift=4.0) == 53


# ---------------------------------------------------------------- quantizers


def test_a_given_number_is_no_leaf(getkey):
    """So that weight decay leaves it."""
    x = jr.normal(getkey(), (6,))
    for number in (0.1, np.float32(0.25), 1):
        given = nn.FakeQuantize(4, scale=number)
        assert (jax.tree.leaves(given), given.constant) == ([], number)
        of_array = nn.FakeQuantize(4, scale=jnp.array(float(number)))
        np.testing.assert_array_equal(given(x), of_array(x))


def test_a_scale_that_is_zero():
    linear = eqx.nn.Linear(4, 3, key=KEY)
    zero = eqx.tree_at(lambda layer: layer.weight, linear, jnp.zeros((3, 4)))
    gradient = eqx.filter_grad(lambda layer: jnp.sum((layer(jnp.ones(4)) - 1) ** 2))
    assert not np.any(gradient(nn.Quantized(zero, nn.Ternary())).weight)
    for quantizer in (nn.Ternary(scale=False), nn.Binary()):
        assert np.all(gradient(nn.Quantized(zero, quantizer)).weight != 0)


DTYPES = quick_only(("float16", "bfloat16", "float32"), ("float16",), pytest.mark.thorough)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype(dtype):
    """`LSQ` has the scale of the paper; all results are finite, and so is the derivative."""
    largest = float(jnp.finfo(dtype).max)
    for bits, size in itertools.product((2, 8), (1.0, largest / 2000)):
        expected = min(2 * size / (2 ** (bits - 1) - 1) ** 0.5, largest)
        scale = nn.LSQ(bits, channel_axis=0).fit(jnp.full((3, 1000), size, dtype)).scale
        assert scale.dtype == dtype
        scale = np.asarray(scale.astype(jnp.float32), np.float64)
        np.testing.assert_allclose(scale, expected, rtol=4 * float(jnp.finfo(dtype).eps))
    options = [{}, {"learn_scale": True}, {"asymmetric": True}, {"signed": False}]
    kinds = [nn.FakeQuantize(bits, **o) for o in options for bits in (2, 8)]
    kinds += [nn.FakeQuantize(1, signed=False, asymmetric=True), nn.LSQ(3), nn.LSQ(8)]

    @jax.jit
    def run(x):
        found = [jax.vjp(kind.fit(x), x) for kind in kinds]
        return [(y, pull(jnp.ones_like(y))[0]) for y, pull in found]

    for row in ((-1.0, 0.3, 1.0), (0.0, 0.5, 1.0), (-1.0, 0.0, 0.1)):
        x = largest * jnp.array(row, dtype)
        for kind, (y, ct) in zip(kinds, run(x), strict=True):
            assert jnp.isfinite(y).all(), kind
            assert jnp.isfinite(ct).all(), kind
            # No side is lost.
            assert jnp.all(jnp.sign(y) * jnp.sign(x) >= 0), kind


def test_the_largest_integer_times_its_scale_is_rounded_up():
    largest = jnp.full((1, 1), jnp.finfo("float16").max, "float16")
    layer = nn.Quantized(Weighted(largest), nn.FakeQuantize(3, learn_scale=True))
    stored, _ = nn.to_integers([layer])
    assert equal_bits(stored[0].quantized_weight(), layer.quantized_weight())


# ---------------------------------------------------------------- the codebook


def test_indices_of_any_integers(getkey):
    vq = nn.VectorQuantizer(200, 2, key=getkey())
    for dtype in ("int8", "uint32"):
        indices = jnp.array([0, 100, 127], dtype)
        np.testing.assert_array_equal(vq.decode(indices), vq.codebook[np.array([0, 100, 127])])
        assert jnp.isnan(vq.decode(jnp.array([-1, 201]).astype(dtype))).all()
    assert_close(vq.updated(vq.codebook).codebook, vq.codebook)  # all are in use
    far = vq.codebook.astype("float32") + 4096
    assert jnp.array_equal(ste.vector_quantize(far, far)[1], jnp.arange(200))


@pytest.mark.slow
def test_vectors_that_are_not_finite_are_left_out(getkey):
    bad = jnp.array([[jnp.nan, 0.0], [jnp.inf, 1.0], [1.0, -jnp.inf]], "float32")
    z, options = jr.normal(getkey(), (2, 2), "float32"), {"dtype": "float32", "key": getkey()}
    vq = nn.VectorQuantizer(4, 2, decay=0.5, **options)
    got, expected = vq.updated(jnp.concatenate([bad[:1], z, bad[1:]])), vq.updated(z)
    assert_close((got.codebook, got.usage), (expected.codebook, expected.usage), tolerance=1e-6)
    # Nor do they take the place of dead entries: here there are more of those than vectors.
    dying = nn.VectorQuantizer(4, 2, dead_below=2.0, **options)
    new = dying.updated(jnp.concatenate([bad, z]), key=getkey())
    replaced = np.asarray(new.codebook)[np.asarray(new.usage) == 0.25]
    assert {row.tobytes() for row in replaced} == {row.tobytes() for row in np.asarray(z)}
    assert eqx.tree_equal(dying.updated(bad, key=getkey()), dying)


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
    of_input = {f"{attention}.{name}_proj" for name in ("query", "key", "value")}
    rows = {row.path: (row.layer, row.weights, row.inputs) for row in report.swapped}
    assert rows == {
        **dict.fromkeys(of_input, ("Linear", "4 bits signed", "6 bits signed")),
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
    with raises(r"(?s)not used: rule 0, 'heads.a'.*`\['heads'\]\['a'\]`.*as in Python"):
        nn.quantize_model(model, {"heads.a": nn.LSQ(2)})


def test_the_report_is_a_table():
    cell = lambda key: eqx.nn.GRUCell(2, 3, use_bias=False, dtype="float32", key=key)
    conv = lambda key: eqx.nn.Conv2d(1, 2, 3, key=key)
    model = blank(lambda key: [conv(key), eqx.nn.Linear(5, 6, key=key), cell(key)])
    new, report = nn.quantize_model(model, [(eqx.nn.Conv, (nn.LSQ(2), nn.FakeQuantize(8)))])
    assert str(report) == (
        "swapped: 1\n"
        "  [0]  Conv2d  weights 2 bits signed  inputs 8 bits signed  (2, 1, 3, 3)\n"
        "left: 3\n"
        "  [1]            Linear   (6, 5)  no rule\n"
        "  [2].weight_ih  float32  (9, 2)  of no layer\n"
        "  [2].weight_hh  float32  (9, 3)  of no layer"
    )
    again, report = nn.quantize_model(new, {"*": nn.Binary()})
    assert again[0] is new[0]
    assert left(report)["[0]"] == "quantized already"


def test_shared_layers(getkey):
    linear = eqx.nn.Linear(2, 2, key=getkey())
    model = {"a": linear, "b": [linear], "c": linear}
    new, report = nn.quantize_model(model, {"*": nn.LSQ(2)})
    assert new["a"] is new["b"][0] is new["c"]
    assert [row.note for row in report.swapped] == ["", *2 * ["shared with ['a']"]]
    rules = {"['b']": 2 * (nn.LSQ(2),), "['c']": 2 * (nn.LSQ(4),)}
    call = lambda model, x: (model["b"][0](x), model["c"](x))
    new, _ = nn.quantize_model(model, rules, calibrate=jnp.ones(2), call=call)
    for layer, bits in ((new["b"][0], 2), (new["c"], 4)):
        assert layer.weight_quantizer.bits == layer.input_quantizer.bits == bits
    # A weight that is shared is left, and in a call both are arrays.
    pair = [linear, eqx.nn.Linear(2, 2, key=getkey())]
    share = lambda m: eqx.nn.Shared(m, lambda m: m[1].weight, lambda m: m[0].weight)
    shared = share(nn.quantize_model(pair, {"*": nn.LSQ(2)})[0])
    _, report = nn.to_integers(shared)
    assert report.left[0].note == "its weight is a `SharedNode`"
    stored, report = nn.to_integers(shared())
    assert equal_bits(stored[1](jnp.ones(2)), shared()[1](jnp.ones(2)))
    with raises(r"its weight is a `SharedNode`(?s:.)*before it is shared"):
        nn.quantize_model(share(pair), {"*": nn.LSQ(2)})


# ---------------------------------------------------------------- calibration

QUANTIZERS = (nn.LSQ(4), nn.LSQ(3, signed=False))


@pytest.mark.slow
def test_inputs_of_a_model_with_quantized_weights(getkey):
    """Training goes on with quantized inputs: the weights and their scales stay."""
    batch, inputs = jr.normal(getkey(), (20, 4)), nn.FakeQuantize(4, learn_scale=True)
    model = eqx.nn.MLP(4, 2, 8, 1, key=getkey())
    model, _ = nn.quantize_model(model, {eqx.nn.Linear: nn.LSQ(bits=3, channel_axis=0)})
    for which in (eqx.nn.Linear, nn.Quantized, "layers[*]", eqx.nn.MLP):
        got, report = nn.quantize_model(model, {which: (None, inputs)}, calibrate=batch)
        expected = ("weights as they were", "3 bits signed", "4 bits signed")
        assert [(row.note, row.weights, row.inputs) for row in report.swapped] == 2 * [expected]
        # The inputs are those of the layers with quantized weights.
        hidden = jax.nn.relu(jax.vmap(model.layers[0])(batch))
        for new, old, x in zip(got.layers, model.layers, (batch, hidden), strict=True):
            assert new.weight is old.weight
            assert new.weight_quantizer.scale is old.weight_quantizer.scale
            want = inputs.fit(x).scale
            np.testing.assert_allclose(new.input_quantizer.scale, want, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("scan", [False, True])
def test_calibration_of_ensembles_and_scans(scan, getkey):
    """Each member of an ensemble, and each layer of a scan over layers, has its own scale."""
    x = jnp.abs(jr.normal(getkey(), (10, 4)))  # `QUANTIZERS` are unsigned
    mlp = eqx.nn.MLP(4, 2, 4, 3, activation=jax.nn.softplus, scan=scan, key=getkey())
    new, _ = nn.quantize_model(mlp, {"*": QUANTIZERS}, calibrate=x)
    got = np.concatenate([np.ravel(layer.input_quantizer.scale) for layer in new.layers])
    want, h = [], x
    for layer in mlp.layers:
        arrays = layer.weight, layer.bias
        arrays = arrays if layer.weight.ndim == 3 else [x[None] for x in arrays]
        for weight, bias in zip(*arrays, strict=True):
            want.append(2 * np.mean(np.abs(h)) / 7**0.5)
            h = jax.nn.softplus(h @ weight.T + bias[None])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert new(x[0]).shape == (2,)
    # Their integers too.
    stored, _ = nn.to_integers(new)
    assert equal_bits(stored(x[0]), new(x[0]))
    members = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 3, key=key))(jr.split(getkey(), 2))
    scaled = jnp.stack([x, 3 * x], 1)  # one input for each member
    call = lambda model, x: jax.vmap(eqx.filter_vmap(lambda m, x: m(x)), (None, 0))(model, x)
    new, _ = nn.quantize_model(members, {"*": QUANTIZERS}, calibrate=scaled, call=call)
    base = 2 * np.mean(np.abs(x)) / 7**0.5
    np.testing.assert_allclose(new.input_quantizer.scale, [base, 3 * base], rtol=1e-5)
    assert nn.to_integers(new)[0].weight_quantizer.scale.shape == (2,)


def test_calibration_errors(getkey):
    model = {name: eqx.nn.Linear(3, 2, key=getkey()) for name in "ab"}
    call = lambda model, x: jax.vmap(model["a"])(x)
    some = {"calibrate": jnp.ones((6, 3)), "call": call}
    with raises(r"(?s)no inputs to calibrate a layer.*`\['b'\]` is not called.*`call=lambda"):
        nn.quantize_model(model, {"*": QUANTIZERS}, **some)
    new, _ = nn.quantize_model(model, {"['b']": None, "*": QUANTIZERS}, **some)
    assert new["a"].input_quantizer.scale > 0
    for inputs in (nn.FakeQuantize(8), nn.FakeQuantize(8, scale=0.1)):
        with raises(r"nothing to calib(?s:.)*`learn_scale=True`. Without it,"):
            nn.quantize_model(model, {"*": (nn.LSQ(4), inputs)}, **some)
    groups = nn.FakeQuantize(8, learn_scale=True, group_size=3)  # had scales of all inputs
    with raises("(?s)can't fit an input quantizer with a `group_size`"):
        nn.quantize_model(model, {"['a']": (None, groups)}, **some)
    with raises(r"that has its scale(?s:.)*from a file(?s:.)*=1.0`"):
        nn.quantize_model(model, {"*": QUANTIZERS})
    make = lambda: nn.quantize_model(model["a"], {"*": QUANTIZERS}, calibrate=jnp.ones((6, 3)))
    match = r"no inputs to calibrate(?s:.)*outside of `jax.jit`(?s:.)*from a file"
    for run in (eqx.filter_eval_shape, lambda make: eqx.filter_jit(make)()):
        with raises(match):
            run(make)


@pytest.mark.parametrize(
    "quantizer",
    [nn.LSQ, ft.partial(nn.FakeQuantize, learn_scale=True, narrow=True)],
    ids=["LSQ", "FakeQuantize"],
)
@pytest.mark.parametrize(("skeleton", "scan"), [(False, True), (True, False)])
def test_a_calibrated_model_is_read_without_a_batch(quantizer, skeleton, scan, getkey):
    rules = lambda scale=None: {"*": (quantizer(4), quantizer(4, scale=scale))}
    network = lambda key: eqx.nn.MLP(3, 2, 4, 3, jax.nn.softplus, scan=scan, key=key)
    batch = jr.uniform(getkey(), (10, 3))
    model, _ = nn.quantize_model(network(getkey()), rules(), calibrate=batch)
    make = lambda: nn.quantize_model(network(jr.key(0)), rules(scale=1.0))[0]
    read = saved(model, eqx.filter_eval_shape(make) if skeleton else make())
    assert eqx.tree_equal(read, model)
    assert equal_bits(read(batch[0]), model(batch[0]))


# ---------------------------------------------------------------- integers

STORED = [
    nn.FakeQuantize(8, channel_axis=0),
    nn.FakeQuantize(3, scale=0.25, narrow=True),
    nn.FakeQuantize(5, scale=np.full((6, 1), 0.1), signed=False),
    nn.FakeQuantize(24, learn_scale=True),
    nn.FakeQuantize(1, signed=False),
    nn.LSQ(12, channel_axis=-1),
    nn.LSQ(4, group_size=8),
    nn.FakeQuantize(4, asymmetric=True, group_size=8, signed=False),
    nn.FakeQuantize(8, asymmetric=True, learn_scale=True, channel_axis=0),
]


@pytest.mark.parametrize("quantizer", STORED, ids=range(len(STORED)))
def test_the_product_is_the_output_of_the_quantizer(quantizer, getkey):
    x = jr.normal(getkey(), (6, 40)).astype(jnp.bfloat16)
    quantizer = quantizer.fit(x)
    integers, scale, *zero = quantizer.encode(x)
    if quantizer.group_size:
        assert scale.shape == (6, 5)
        scale, *zero = (jnp.repeat(a, 8, axis=1) for a in (scale, *zero))
    levels = integers.astype(scale.dtype) - (zero[0].astype(scale.dtype) if zero else 0)
    assert jnp.array_equal((levels * scale).astype(x.dtype), quantizer(x))
    bits, kind = quantizer.bits, "" if quantizer.signed else "u"
    assert integers.dtype == f"{kind}int{8 if bits <= 8 else 16 if bits <= 16 else 32}"
    low = -(2 ** (bits - 1)) if quantizer.signed else 0
    assert low <= int(integers.min()) <= int(integers.max()) < low + 2**bits


@pytest.mark.parametrize(
    ("shape", "quantizer"),
    [((4, 6, 3, 3), nn.FakeQuantize(4)), ((5, 8), nn.Binary()), ((3, 5), nn.LSQ(2))],
)
def test_integers_of_four_bits_are_two_in_a_byte(quantizer, shape, getkey):
    """The halves of the last axis of even size, by NumPy."""
    weight = jr.normal(getkey(), shape)
    layer = nn.Quantized(Weighted(weight), quantizer)
    stored, _ = nn.to_integers([layer])
    codes = np.asarray(layer.weight_quantizer.encode(weight)[0]).astype(int)
    even = [i for i, size in enumerate(shape) if size % 2 == 0]
    if even:
        low, high = np.split(codes % 16, 2, even[-1])
        codes = (low + 16 * high).astype(np.uint8)
    np.testing.assert_array_equal(stored[0].layer.weight, codes)
    assert equal_bits(stored[0].quantized_weight(), layer.quantized_weight())
    for options in ({"signed": False}, {"asymmetric": True}):
        other = nn.Quantized(Weighted(weight + 3), nn.FakeQuantize(4, **options))
        stored, _ = nn.to_integers([other])
        assert equal_bits(stored[0].quantized_weight(), other.quantized_weight())


def test_the_report_of_to_integers(getkey):
    linear = lambda: eqx.nn.Linear(3, 2, dtype="float32", key=getkey())
    shared = linear()
    model = {"a": [shared, shared], "b": linear(), "c": linear(), "d": linear(), "e": linear()}
    rules = {
        "['a']": nn.LSQ(4),
        "['b']": (nn.FakeQuantize(9, channel_axis=0), nn.FakeQuantize(4)),
        "['c']": (None, nn.FakeQuantize(8)),
        "['d']": (ste.binary_sign, None),
    }
    model, _ = nn.quantize_model(model, rules)
    stored, report = nn.to_integers(model)
    assert stored["a"][0] is stored["a"][1]
    assert stored["b"].bias is model["b"].bias
    assert eqx.tree_equal(stored["b"].input_quantizer, model["b"].input_quantizer)
    assert [(row.path, row.note) for row in report.swapped] == [
        ("['a'][0]", f"uint8, {3 + stored['a'][0].weight_quantizer.scale.nbytes} bytes"),
        ("['a'][1]", "shared with ['a'][0]"),
        ("['b']", "int16, 20 bytes"),
    ]
    assert left(report) == {
        "['c']": "its weight is not quantized",
        "['d']": "`binary_sign` has no `encode`",
        "['e']": "not quantized",
    }
    nbytes = lambda m: sum(
        x.nbytes for x in jax.tree.leaves({**m, "a": m["a"][0]}) if eqx.is_array(x)
    )
    assert report.sizes == (nbytes(stored), nbytes(model))
    assert str(report).endswith(f"{nbytes(stored)} bytes, {nbytes(model)} before")
    grads = eqx.filter_grad(lambda model: jnp.sum(model["b"](jnp.ones(3, "float32"))))(stored)
    assert grads["b"].weight is None
    assert jnp.any(grads["b"].bias != 0)
    codes, scale, *_ = nn.Binary(scale=False).encode(jnp.array([-0.3, 2.0]))
    assert (codes.tolist(), float(scale)) == ([-1, 1], 1.0)


def test_a_quantizer_of_your_own_that_claims_too_few_bits():
    class Own(nn.AbstractQuantizer):
        bits: int

        def fit(self, x):
            return self

        def encode(self, x):
            return jnp.round(4 * x).astype("uint8"), jnp.array(0.25)

        def __call__(self, x, *, key=None):
            return ste.round(4 * x) / 4

    of = lambda bits, *xs: nn.Quantized(Weighted(jnp.array([xs])), Own(bits))
    with raises(r"`Own.encode` returned(?s:.)*from 15 to 20"):
        nn.to_integers([of(4, 3.75, 5.0)])
    for bits in (4, 5):
        layer = of(bits, 3.75, 0.5)
        stored, _ = nn.to_integers([layer])
        assert stored[0].weight.size == bits - 3
        assert equal_bits(stored[0].quantized_weight(), layer.quantized_weight())


# ---------------------------------------------------------------- errors

RULE = {"*": nn.LSQ(2)}
many = lambda n=13: [eqx.nn.Linear(1, 1, key=KEY) for _ in range(n)]
ERRORS = [
    (lambda: nn.LSQ(2).fit(jnp.array([-np.inf, 1.0])), "its largest magnitude is inf"),
    (lambda: nn.LSQ(4, scale=jnp.ones((4, 1))).encode(jnp.ones(3)), "does not broadcast"),
    (lambda: nn.quantize_model(many(1), {"*": nn.LSQ(2), "[0]": None}), "not used: rule 1"),
    (lambda: nn.quantize_model([nn.Quantized(*many(1))], RULE), ": Linear, quantized alr"),
    (lambda: nn.quantize_model(many(1), {"*": (nn.LSQ(2),)}), "not say how to quantize"),
    # Lists say what they leave out.
    (
        lambda: nn.quantize_model(many(), {eqx.nn.Conv: nn.LSQ(4)}),
        r"`\[9\]`: Linear, no rule\n  and 3",
    ),
    (lambda: nn.quantize_model([jnp.ones(2)] * 7, {"[?]": nn.LSQ(4)}), r"`\[1\]`: an array\n"),
    (lambda: nn.to_integers([nn.Quantized(x) for x in many()]), r"(?s)`\[7\]`: it.*and 5 more"),
]


@pytest.mark.usefixtures("without_type_checks")
def test_errors():
    for call, match in ERRORS:
        with raises(match):
            call()
