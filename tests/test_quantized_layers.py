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
import jaxtyping
import numpy as np
import optax
import pytest
from eqx_grads import RuleError, ste

from .helpers import assert_close, checking_leaks


stop = jax.lax.stop_gradient


def raises(match):
    return pytest.raises(RuleError, match=match)


def distinct(x):
    return len(np.unique(np.asarray(x)))


# ---------------------------------------------------------------- plain references


def through(value, slope):
    """What people write. It rounds; its gradient is right."""
    return slope + stop(value - slope)


def plain_round(x):
    return through(jnp.round(x), x)


def plain_lsq(x, scale, low, high):
    g = 1 / (x.size / scale.size * high) ** 0.5
    scale = jnp.broadcast_to(stop(scale * (1 - g)) + scale * g, x.shape)
    return plain_round(jnp.clip(x / scale, low, high)) * scale


# ---------------------------------------------------------------- layers


def make_network(key, dtype):
    """Quantizers whose scales are learned, of a convolution and of layers of few bits."""
    keys = jr.split(key, 3)
    layers = [
        nn.Quantized(eqx.nn.Conv1d(1, 2, 3, dtype=dtype, key=keys[0]), nn.LSQ(3)),
        eqx.nn.Lambda(jnp.ravel),
        nn.Quantized(eqx.nn.Linear(8, 8, dtype=dtype, key=keys[1]), nn.Ternary()),
        nn.LSQ(3, signed=False, scale=jnp.asarray(0.31, dtype)),
        nn.Quantized(eqx.nn.Linear(8, 3, dtype=dtype, key=keys[2]), nn.Binary()),
    ]
    return eqx.nn.Sequential(layers)


@pytest.mark.slow
def test_no_leaks_and_half_precision(getkey):
    network = make_network(getkey(), "bfloat16")
    x = jr.normal(getkey(), (1, 6), "bfloat16")

    @eqx.filter_jit
    @ft.partial(eqx.filter_value_and_grad, has_aux=True)
    def run(network):
        y = network(x)
        return jnp.sum(y), (y, [network[i].quantized_weight() for i in (0, 2, 4)])

    with checking_leaks():
        (_, outputs), grads = run(network)
    assert {a.dtype.name for a in jax.tree.leaves((outputs, grads))} == {"bfloat16"}
    conv, ternary, binary = outputs[1]
    assert distinct(conv) <= 8
    assert max(map(distinct, ternary)) <= 3
    assert max(map(distinct, binary)) <= 2


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


@pytest.mark.slow
def test_weight_decay_leaves_a_given_number(getkey):
    x = jr.normal(getkey(), (6,))
    for number in (0.1, np.float32(0.25), 1):
        given = nn.FakeQuantize(4, scale=number)
        assert jax.tree.leaves(given) == []
        assert (given.scale, given.constant) == (None, number)
        np.testing.assert_array_equal(
            given(x), nn.FakeQuantize(4, scale=jnp.array(float(number)))(x)
        )
    linear = eqx.nn.Linear(6, 2, key=getkey())
    model = nn.Quantized(linear, nn.FakeQuantize(4, scale=0.1), given)
    before, optimizer = model, optax.adamw(0.1, weight_decay=0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    for _ in range(2):
        grads = eqx.filter_grad(lambda model: jnp.sum(model(x)))(model)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
    assert jnp.all(model.weight != before.weight)
    assert (model.weight_quantizer.constant, model.input_quantizer.constant) == (0.1, 1)
    # `equinox.nn.MLP` scans over its layers, which may then hold arrays only.
    mlp = eqx.nn.MLP(2, 2, 2, 3, scan=True, key=getkey())
    quantized = nn.quantize_model(mlp, {"*": (nn.FakeQuantize(4, scale=0.1), given)})[0]
    assert jnp.isfinite(quantized(x[:2])).all()
    # A learned one is a parameter still.
    learned = nn.FakeQuantize(4, scale=0.1, learn_scale=True)
    assert len(jax.tree.leaves(learned)) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSQ(4, channel_axis=0),
        lambda: nn.FakeQuantize(4, channel_axis=0, learn_scale=True),
        lambda: nn.FakeQuantize(4, scale=jnp.full((2, 1), 0.1)),
    ],
    ids=["LSQ", "learned", "array"],
)
def test_a_scale_has_the_path_of_the_page(make, getkey):
    """`is_scale` of the page on quantization layers, for weight decay and frozen scales."""
    layer = nn.Quantized(eqx.nn.Linear(6, 2, key=getkey()), make())
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert paths == [".layer.weight", ".layer.bias", ".weight_quantizer.scale"]


def test_the_largest_is_not_clipped_in_half_precision():
    xs = jnp.asarray(1.03 ** np.arange(40), "bfloat16")
    slopes = jax.jit(jax.vmap(jax.grad(nn.FakeQuantize(12))))(xs)
    np.testing.assert_array_equal(slopes, jnp.ones_like(xs))


def test_codes_of_fsq():
    fsq, everyone = nn.FSQ((4, 3, 5)), jnp.arange(60)
    assert fsq.num_codes == 60
    codes = fsq.decode(everyone)
    assert distinct([hash(code.tobytes()) for code in np.asarray(codes)]) == 60
    assert np.isnan(fsq.decode(jnp.array([-61, -60, -1, 60]))).all()
    # What stays apart from the edges of its cell comes back as the code that it is.
    again, indices = fsq.quantize(jnp.arctanh(0.9 * codes))
    np.testing.assert_array_equal(indices, everyone)
    np.testing.assert_array_equal(again, codes)


# ---------------------------------------------------------------- the codebook


def nearest(z, codebook):
    """By all distances, in double precision."""
    z, codebook = np.asarray(z, "float64"), np.asarray(codebook, "float64")
    return ((z[:, None] - codebook) ** 2).sum(-1).argmin(1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int32"])
def test_indices_of_any_integers(dtype, getkey):
    vq = nn.VectorQuantizer(200, 2, key=getkey())
    indices = jnp.array([0, 100, 127], dtype)
    np.testing.assert_array_equal(vq.decode(indices), vq.codebook[np.array([0, 100, 127])])
    assert jnp.isnan(vq.decode(jnp.array([-1, 201]).astype(dtype))).all()


@pytest.mark.thorough
def test_losses_of_nothing_and_of_large_numbers(getkey):
    vq = nn.VectorQuantizer(4, 3, ema=False, dtype="float32", key=getkey())
    loss = lambda vq, z: sum(vq.quantize(z)[2:])
    nothing = jnp.ones((0, 3), "float32")
    value, grad = eqx.filter_value_and_grad(loss)(vq, nothing)
    assert value == 0
    assert not grad.codebook.any()
    large = jnp.full((2, 3), 1000, "float16")
    *_, codebook_loss, commitment_loss = vq.quantize(large)
    near = np.asarray(vq.codebook)[nearest(large, vq.codebook)]
    expected = np.mean((1000 - near) ** 2)
    np.testing.assert_allclose(codebook_loss, expected, rtol=1e-3)
    np.testing.assert_allclose(commitment_loss, 0.25 * expected, rtol=1e-3)


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


@pytest.mark.slow
@pytest.mark.parametrize("ema", [False, True])
def test_dead_entries_are_replaced(ema, getkey):
    vq = nn.VectorQuantizer(8, 2, ema=ema, decay=0.5, dead_below=0.2, key=getkey())
    far = vq.codebook.at[:].set(100.0).at[0].set(5.0)
    vq = eqx.tree_at(lambda vq: vq.codebook, vq, far)
    z = jr.normal(getkey(), (40, 2), vq.codebook.dtype)
    update = eqx.filter_jit(lambda vq, key: vq.updated(z, key=key))
    one = update(vq, getkey())
    np.testing.assert_array_equal(one.codebook[1:], far[1:])  # not dead yet
    three = update(update(one, getkey()), getkey())
    rows = {row.tobytes() for row in np.asarray(z)}
    assert all(row.tobytes() in rows for row in np.asarray(three.codebook[1:]))
    np.testing.assert_array_equal(three.usage[1:], 1 / 8)
    assert vq.quantize(z).commitment_loss > 2 * three.quantize(z).commitment_loss
    # Without a key, the choice of vectors is the same in every call.
    twice = [update(update(one, None), None) for _ in range(2)]
    assert eqx.tree_equal(*twice)
    assert {row.tobytes() for row in np.asarray(twice[0].codebook[1:])} < rows
    assert eqx.tree_equal(vq.fit(z), vq.fit(z))


@pytest.mark.slow
def test_a_codebook_for_images_and_an_ensemble(getkey):
    images = jr.normal(getkey(), (2, 3, 4, 6), "float32")
    flat = jnp.moveaxis(images, 1, -1).reshape(-1, 3)
    key, keys = getkey(), jr.split(getkey(), 2)
    make = ft.partial(nn.VectorQuantizer, 5, 3, ema=True, dtype="float32")

    # Codebooks are made before `run`: compiled with it, each use of one may round differently.
    @eqx.filter_jit
    def made():
        ensemble = eqx.filter_vmap(lambda key: make(key=key))(keys)
        return make(axis=-3, key=key), ensemble

    @eqx.filter_jit
    def run(vq, ensemble):
        quantized = vq.quantize(images)
        decoded, one_by_one = vq.decode(quantized.indices), jax.vmap(vq)(images)
        updated = vq.updated(images), make(key=key).updated(flat)
        both = jnp.stack([flat, -flat])
        values = eqx.filter_vmap(lambda vq, z: vq(z))(ensemble, both)
        # A codebook in half precision for vectors in single precision.
        half = nn.VectorQuantizer(5, 3, ema=True, dtype="bfloat16", key=key)
        member = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, ensemble)
        first = member(flat)
        halves = half.quantize(flat), half.updated(flat)
        return quantized, decoded, one_by_one, updated, values[0], first, halves

    quantized, decoded, one_by_one, updated, of_member, first, halves = run(*made())
    assert quantized.indices.shape == (2, 4, 6)
    np.testing.assert_array_equal(decoded, quantized.value)
    np.testing.assert_array_equal(one_by_one, quantized.value)
    assert_close(updated[0].codebook, updated[1].codebook, tolerance=1e-6)
    np.testing.assert_array_equal(of_member, first)
    assert halves[0].value.dtype == halves[0].commitment_loss.dtype == "float32"
    assert (halves[1].usage.dtype, halves[1].codebook.dtype) == ("float32", "bfloat16")


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
        assert max(map(distinct, weight)) <= 4
        plain = eqx.tree_at(lambda layer: layer.weight, layer, weight)
        kwargs = {"shift": 3.0} if isinstance(layer, Own) else {}
        np.testing.assert_array_equal(quantized(*args, **kwargs), plain(*args, **kwargs))


def test_any_function_is_a_quantizer(getkey):
    x = jr.normal(getkey(), (3,))
    learned = eqg.with_gradient_of(jnp.sign, eqx.nn.PReLU(0.1))
    fake = ft.partial(ste.fake_quantize, scale=0.2, bits=2)
    for quantizer in (ste.binary_sign, fake, learned):
        make = lambda key, q=quantizer: nn.Quantized(eqx.nn.Linear(3, 2, key=key), q)
        layer = make(getkey())
        np.testing.assert_array_equal(layer.quantized_weight(), quantizer(layer.weight))
        of_two = lambda keys, make=make: eqx.filter_vmap(lambda member: member(x))(
            eqx.filter_vmap(make)(keys)
        )
        outputs = eqx.filter_eval_shape(of_two, jr.split(getkey(), 2))
        assert outputs.shape == (2, 2)
        if quantizer is not learned:  # layers that are scanned over may hold arrays only
            assert all(eqx.is_array(leaf) for leaf in jax.tree.leaves(layer))


@pytest.mark.parametrize("quantizer", [nn.FakeQuantize, nn.LSQ])
def test_groups_of_weights(quantizer, getkey):
    """Each group is quantized as if it were alone."""
    weight = jr.normal(getkey(), (3, 8)) * 2.0 ** jnp.arange(8.0)[None]
    for made in (quantizer(4, group_size=2), quantizer(4, group_size=2).fit(weight)):
        pairs = weight.reshape(-1, 2)
        alone = jnp.stack([quantizer(4).fit(pair)(pair) for pair in pairs]).reshape(3, 8)
        if made.needs_fit:
            continue
        np.testing.assert_allclose(made(weight), alone, rtol=1e-6)
    linear = eqx.nn.Linear(8, 3, key=getkey())
    layer = nn.Quantized(linear, quantizer(4, group_size=4))
    stored, report = nn.to_integers([layer])
    assert stored[0].weight_quantizer.scale.shape == (3, 2)
    assert report.swapped[0].note == f"uint8, {12 + 6 * linear.weight.dtype.itemsize} bytes"
    x = jr.normal(getkey(), (8,))
    np.testing.assert_array_equal(stored[0](x), layer(x))
    with raises("`group_size` is 3"):
        nn.Quantized(linear, nn.LSQ(4, group_size=3))


# ---------------------------------------------------------------- whole models


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    feed: eqx.nn.MLP

    def __init__(self, key):
        key1, key2 = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=key1)
        self.norm = eqx.nn.LayerNorm(4)
        self.feed = eqx.nn.MLP(4, 4, 8, 1, key=key2)

    def __call__(self, x):
        x = self.attention(x, x, x)
        return jax.vmap(self.feed)(jax.vmap(self.norm)(x))


class Model(eqx.Module):
    blocks: list[Block]
    heads: dict[str, eqx.nn.Linear]

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.blocks = [Block(keys[0]), Block(keys[1])]
        self.heads = {
            "a": eqx.nn.Linear(4, 2, key=keys[2]),
            "b": eqx.nn.Linear(4, 3, key=keys[3]),
        }

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return {name: jax.vmap(head)(x) for name, head in self.heads.items()}


def blank(make):
    """A model of ones, which takes no time to make."""
    shapes = eqx.filter_eval_shape(make, jr.key(0))
    of_ones = lambda x: jnp.ones(x.shape, x.dtype) if hasattr(x, "shape") else x
    return jax.tree.map(of_ones, shapes)


def swapped(report):
    return {row.path: (row.layer, row.weights, row.inputs) for row in report.swapped}


def left(report):
    return {row.path: row.note for row in report.left}


def test_rules():
    model = blank(Model)
    new, report = nn.quantize_model(
        model,
        {
            "heads['a']": None,
            "heads": nn.LSQ(8, channel_axis=0),
            "blocks[1].*.output_proj": nn.Binary(),
            eqx.nn.MultiheadAttention: (nn.LSQ(4), nn.FakeQuantize(6)),
            "blocks[0].feed.layers[?]": (ste.binary_sign, None),
            eqx.nn.LayerNorm: ste.round,
            "*": nn.Ternary(scale=False),
        },
    )
    attention = {
        f"blocks[{i}].attention.{name}_proj": ("Linear", "4 bits signed", "6 bits signed")
        for i in (0, 1)
        for name in ("query", "key", "value", "output")
    }
    assert swapped(report) == {
        **attention,
        "blocks[0].norm": ("LayerNorm", "round", ""),
        "blocks[1].norm": ("LayerNorm", "round", ""),
        "blocks[0].feed.layers[0]": ("Linear", "binary_sign", ""),
        "blocks[0].feed.layers[1]": ("Linear", "binary_sign", ""),
        "blocks[1].attention.output_proj": ("Linear", "1 bit", ""),
        "blocks[1].feed.layers[0]": ("Linear", "1.58 bits", ""),
        "blocks[1].feed.layers[1]": ("Linear", "1.58 bits", ""),
        "heads['b']": ("Linear", "8 bits signed", ""),
    }
    assert left(report) == {"heads['a']": "rule 0, \"heads['a']\""}
    # What was not swapped is the object that it was.
    assert new.heads["a"] is model.heads["a"]
    assert new.heads["b"].weight is model.heads["b"].weight
    outputs = eqx.filter_eval_shape(new, jnp.zeros((3, 4)))
    assert outputs["b"].shape == (3, 3)


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


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_mlp(scan, getkey):
    model = eqx.nn.MLP(3, 2, 4, 3, scan=scan, key=getkey())
    x = jr.normal(getkey(), (3,))
    quantizers = (nn.LSQ(2), nn.LSQ(3, signed=False, scale=0.5))
    new, report = nn.quantize_model(model, {"layers[0]": nn.LSQ(4), "layers[*]": quantizers})
    assert len(report.swapped) == len(model.layers)

    def plain(model):
        layers = [model.layers[0]]
        for layer in model.layers[1:]:
            if layer.weight.ndim == 2:
                layers.append(layer)
            else:
                layers += [jax.tree.map(lambda a, i=i: a[i], layer) for i in range(2)]
        h, bits = x, (-8, 7)
        for i, layer in enumerate(layers):
            if i > 0:
                h = plain_lsq(jax.nn.relu(h), layer.input_quantizer.scale, 0, 7)
            h = plain_lsq(layer.weight, layer.weight_quantizer.scale, *bits) @ h + layer.bias
            bits = (-2, 1)
        return jnp.sum(jnp.sin(h))

    run = lambda model: jnp.sum(jnp.sin(model(x)))
    grad = lambda f: eqx.filter_jit(eqx.filter_value_and_grad(f))(new)
    assert_close(grad(run), grad(plain), tolerance=1e-4)


@pytest.mark.slow
def test_ensembles(getkey):
    def make(key):
        key1, key2 = jr.split(key)
        return {
            "conv": eqx.nn.Conv1d(1, 2, 3, key=key1),
            "linear": eqx.nn.Linear(4, 3, key=key2),
        }

    keys = jr.split(getkey(), 2)
    rules = {
        "['conv']": (nn.LSQ(3, channel_axis=0), nn.LSQ(4, scale=0.3)),
        "['linear']": nn.LSQ(2),
    }
    many = eqx.filter_jit(eqx.filter_vmap(make))(keys)
    stacked, report = nn.quantize_model(many, rules)
    assert [row.shape for row in report.swapped] == [(2, 2, 1, 3), (2, 3, 4)]
    members = [jax.tree.map(lambda a, i=i: a[i], many) for i in range(2)]
    members = [nn.quantize_model(member, rules)[0] for member in members]
    assert_close(
        stacked, jax.tree.map(lambda *leaves: jnp.stack(leaves), *members), tolerance=1e-6
    )
    # Quantized beneath `filter_vmap`.
    beneath = eqx.filter_vmap(lambda model: nn.quantize_model(model, rules)[0])(many)
    assert_close(stacked, beneath, tolerance=1e-6)
    x = jr.normal(getkey(), (1, 6))
    call = eqx.filter_jit(lambda model: jax.vmap(model["linear"])(model["conv"](x)))
    outputs = eqx.filter_vmap(call)(stacked)
    assert_close(outputs, jnp.stack([call(member) for member in members]), tolerance=1e-5)


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


def test_skeletons(getkey):
    """A model on disk is read into one that was never made."""
    unquantized = lambda: eqx.nn.MLP(3, 2, 4, 1, key=jr.key(0))
    make = lambda: nn.quantize_model(unquantized(), {"*": nn.LSQ(2)})[0]
    model, skeleton = make(), eqx.filter_eval_shape(make)
    with raises("its weight is a `ShapeDtypeStruct`"):
        nn.quantize_model(eqx.filter_eval_shape(unquantized), {"*": nn.LSQ(2)})
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, skeleton), model)


# ---------------------------------------------------------------- errors


@pytest.fixture
def unchecked():
    """As users have it, whose calls nothing checks against the annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


KEY = jr.key(0)
make_vq = ft.partial(nn.VectorQuantizer, 4, 3, key=KEY)
UNIFORM = (nn.FakeQuantize, nn.LSQ)
REFUSED = [
    *[(kind, "bits", x) for kind in UNIFORM for x in (2.5, "4", None, True, 1, 25)],
    *[(kind, "channel_axis", 0.0) for kind in UNIFORM],
    *[(kind, "group_size", x) for kind in UNIFORM for x in (0, -2, 2.0, True)],
    *[(kind, "scale", x) for kind in UNIFORM for x in (0.0, np.inf, jnp.array([1.0, -2.0]))],
    *[(nn.LSQ, "gradient_scale", x) for x in ("a", -1, 0.0, np.nan)],
    *[(nn.FSQ, "levels", x) for x in (8, (8, 2.5), (8, "5"), (8, True), (1, 5))],
    *[(ft.partial(nn.FSQ, (3, 3)), "axis", x) for x in ("last", 0)],
    *[(make_vq, name, x) for name in ("commitment", "dead_below") for x in (-1, "a", np.inf)],
    *[(make_vq, "decay", x) for x in (-0.1, None, 1.0)],
    (ft.partial(nn.VectorQuantizer, size=3, key=KEY), "num_entries", 2.0),
    *[(nn.Ternary, "threshold", x) for x in (-1, "median", None, np.nan)],
]


def name_of(make):
    return getattr(make, "func", make).__name__


@pytest.mark.parametrize(
    ("make", "option", "value"), REFUSED, ids=lambda x: name_of(x) if callable(x) else None
)
def test_options_that_are_refused(make, option, value, unchecked):
    with raises(rf"`{name_of(make)}`") as caught:
        make(**{option: value})
    assert option in str(caught.value)


def errors_of_models():
    """Calls, and what their errors say."""
    model, linear, rule = blank(Model), eqx.nn.Linear(2, 3, key=KEY), {"*": nn.LSQ(2)}
    done, _ = nn.quantize_model(linear, rule)
    quantize, lsq = nn.quantize_model, nn.LSQ(2)
    array = {"pos": jnp.ones((3, 2)), "linear": linear}
    return [
        (lambda: lsq(jnp.ones(3, "float32")), r"`LSQ` has no scale yet(?s:.)*float32\[3\]"),
        (lambda: nn.FakeQuantize(learn_scale=True)(jnp.ones(3)), "`FakeQuantize` has no scale"),
        (lambda: nn.LSQ(2, channel_axis=2).fit(jnp.ones((3, 2))), "`channel_axis` is 2"),
        (lambda: lsq.fit(jnp.zeros((0, 2))), "`LSQ.fit` was given nothing to fit"),
        (lambda: lsq.fit([1.0, 2.0]), "`LSQ.fit` was given (?s:.)*`x` is list"),
        (lambda: nn.Quantized(linear, None, lsq), "`input_quantizer`(?s:.)*has no scale"),
        (
            lambda: nn.Quantized(linear, nn.LSQ),
            "`weight_quantizer` of `Quantized` is not a",
        ),
        (lambda: nn.Quantized(linear, jnp.sum)(jnp.ones(2)), "weight quantizer did not return"),
        (lambda: nn.Quantized(jnp.sin), "`layer` of `Quantized` has no array `weight`"),
        (lambda: quantize(model, {"*": None, "head.a": lsq}), r"no layer: rule 1, 'head.a'"),
        (lambda: quantize(model, {"head.a": lsq}), r"there is `heads\['a'\]`, Linear"),
        (lambda: quantize(model, {eqx.nn.Conv: lsq}), "matches no layer: rule 0, Conv"),
        (lambda: quantize(linear, {"a": lsq}), "there is the model itself, Linear"),
        (lambda: quantize(array, {"*pos*": lsq}), r"there is `\['pos'\]`, an array"),
        (lambda: quantize(model, {"*": lsq, "heads['a']": None}), "is never used: rule 1"),
        (lambda: quantize(model, {"*": 4}), "does not say how to quantize: rule 0(?s:.)*is 4"),
        (lambda: quantize(model, {"*": nn.Binary}), "does not say how to quantize: rule 0"),
        (lambda: quantize(model, {3: lsq}), "does not say which layers it is for: rule 0, 3"),
        (
            lambda: quantize(done, rule),
            "only layers(?s:.)*the model itself is a quantized",
        ),
        (lambda: quantize([done], {eqx.nn.Linear: lsq}), "only layers that are quantized alr"),
        (lambda: quantize([linear], {"*": (None, lsq)}), r"has no scale(?s:.)*about `\[0\]`"),
    ]


def test_errors_of_models(unchecked):
    for call, match in errors_of_models():
        with raises(match):
            call()


def test_vectors_and_indices(unchecked):
    for layer in (nn.FSQ((3, 3, 3), axis=-2), make_vq(axis=-2)):
        name = type(layer).__name__
        for call in (layer, layer.quantize, getattr(layer, "updated", layer)):
            for shape in ((), (3,), (2, 5)):
                with raises(f"`{name}` was given an array(?s:.)*axis` is -2, and the size"):
                    call(jnp.ones(shape))
        for indices in (1.0, jnp.ones(3), True, -1):
            with raises(f"`{name}.decode` was given(?s:.)*with 1 axes or more"):
                layer.decode(indices)
        with raises(f"`{name}` was given something that is not an array of floats"):
            layer([1.0, 2.0])
    assert nn.FSQ(np.array([4, 3])) == nn.FSQ((np.int32(4), 3)) == nn.FSQ((4, 3))
    assert jnp.isnan(nn.FSQ((3, 3)).decode(-1)).all()


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
