"""Quantization layers: values to the bit, gradients against plain autodiff and NumPy."""

import functools as ft
import io
import itertools
import traceback

import equinox as eqx
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


def plain_sign(x):
    return through(jnp.where(x < 0, -1.0, 1.0).astype(x.dtype), jax.nn.hard_tanh(x))


def plain_lsq(x, scale, low, high):
    g = 1 / (x.size / scale.size * high) ** 0.5
    scale = jnp.broadcast_to(stop(scale * (1 - g)) + scale * g, x.shape)
    return plain_round(jnp.clip(x / scale, low, high)) * scale


def plain_fake_quantize(x, scale, low, high):
    scale = jnp.broadcast_to(scale, x.shape)
    u = x / scale
    inside = stop((jnp.round(u) >= low) & (jnp.round(u) <= high))
    return jnp.where(inside, plain_round(u), stop(jnp.clip(u, low, high))) * scale


def plain_ternary(w):
    size = jnp.abs(w)
    keep = stop(size > 0.7 * size.mean(1, keepdims=True)).astype(w.dtype)
    signs = through(keep * jnp.sign(w), jax.nn.hard_tanh(w))
    return signs * jnp.sum(size * keep, 1, keepdims=True) / jnp.sum(keep, 1, keepdims=True)


# ---------------------------------------------------------------- every transformation


def make_front(getkey, dtype):
    return [
        nn.QuantizedConv(1, 1, 2, 3, weight_quantizer=nn.LSQ(3), dtype=dtype, key=getkey()),
        eqx.nn.Lambda(jnp.ravel),
        nn.StraightThrough(jnp.sign, backward="hard_tanh"),
        nn.TernaryLinear(8, 8, dtype=dtype, key=getkey()),
    ]


def plain_front(layers, x):
    conv, _, _, ternary = layers
    w = plain_lsq(conv.weight, conv.weight_quantizer.scale, -4, 3)
    x = sum(w[:, 0, i, None] * x[:, i : i + 4] for i in range(3)) + conv.bias
    x = jnp.ravel(x)
    x = through(jnp.sign(x), jax.nn.hard_tanh(x))
    return plain_ternary(ternary.weight) @ x + ternary.bias


def make_back(getkey, dtype):
    return [
        nn.QuantizedLinear(
            8,
            5,
            dtype=dtype,
            weight_quantizer=nn.LSQ(2, channel_axis=0),
            input_quantizer=nn.FakeQuantize(8, scale=jnp.asarray(0.1, dtype)),
            key=getkey(),
        ),
        nn.LSQ(3, signed=False, scale=jnp.asarray(0.31, dtype)),
        nn.BinaryLinear(5, 3, dtype=dtype, key=getkey()),
    ]


def plain_back(layers, x):
    linear, learned, binary = layers
    x = plain_fake_quantize(x, stop(linear.input_quantizer.scale), -128, 127)
    x = plain_lsq(linear.weight, linear.weight_quantizer.scale, -2, 1) @ x + linear.bias
    x = plain_lsq(x, learned.scale, 0, 7)
    size = jnp.abs(binary.weight).mean(1, keepdims=True)
    return (size * plain_sign(binary.weight)) @ x + binary.bias


def everything(call, *, thorough):
    """A program with every transformation in it, or with those that need the others."""

    def program(arrays, x, *, static):
        def loss(arrays, x):
            return jnp.sum(jnp.sin(call(eqx.combine(arrays, static), x)))

        def scanned(arrays):
            def body(carry, scale):
                y = loss(arrays, carry * scale)
                return jnp.sin(carry + y), y

            carry, ys = jax.lax.scan(body, x, jnp.array([0.8, 1.1], x.dtype))
            return jnp.sum(carry**2) + jnp.sum(ys)

        grad = jax.grad(loss)
        xs = jnp.stack([x, -0.9 * x])
        tangents = jax.tree.map(jnp.cos, arrays)
        ensemble = jax.tree.map(lambda a: jnp.stack([a, 0.7 * a]), arrays)
        some = {
            "value": call(eqx.combine(arrays, static), x),
            "grad": jax.grad(loss, (0, 1))(arrays, x),
            "checkpoint and scan": jax.grad(jax.checkpoint(scanned))(arrays),
            "second order": jax.jvp(lambda a: grad(a, x), (arrays,), (tangents,))[1],
        }
        if not thorough:
            return some
        return some | {
            "jvp": jax.jvp(lambda arrays: loss(arrays, x), (arrays,), (tangents,)),
            "grad(vmap)": jax.grad(lambda a: jnp.sum(jax.vmap(loss, (None, 0))(a, xs)))(arrays),
            "ensemble": jax.vmap(grad)(ensemble, xs),
        }

    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "plain", "shape", "thorough"),
    [
        pytest.param(make_front, plain_front, (1, 6), True, marks=pytest.mark.slow),
        pytest.param(make_back, plain_back, (8,), True, marks=pytest.mark.slow),
        (make_back, plain_back, (8,), False),
    ],
)
def test_every_transformation(make, plain, shape, thorough, getkey):
    network = eqx.nn.Sequential(make(getkey, "float32"))
    x = jr.normal(getkey(), shape, "float32")
    arrays, static = eqx.partition(network, eqx.is_inexact_array)
    got, expected = (
        jax.jit(ft.partial(everything(call, thorough=thorough), static=static))(arrays, x)
        for call in (lambda network, x: network(x), plain)
    )
    for key in expected:
        for a, b in zip(jax.tree.leaves(got[key]), jax.tree.leaves(expected[key]), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=key)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(got["grad"][0]) if g.ndim > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "values", "shape"),
    [
        pytest.param(make_front, {0: 8, 3: 3}, (1, 6), marks=pytest.mark.slow),
        (make_back, {0: 4, 2: 2}, (8,)),
    ],
)
def test_no_leaks_and_half_precision(make, values, shape, getkey):
    network = eqx.nn.Sequential(make(getkey, "bfloat16"))
    x = jr.normal(getkey(), shape, "bfloat16")

    @eqx.filter_jit
    @ft.partial(eqx.filter_value_and_grad, has_aux=True)
    def run(network):
        y = network(x)
        return jnp.sum(y), (y, [network[i].quantized_weight() for i in values])

    with checking_leaks():
        (_, outputs), grads = run(network)
    assert {a.dtype.name for a in jax.tree.leaves((outputs, grads))} == {"bfloat16"}
    for weight, most in zip(outputs[1], values.values(), strict=True):
        groups = [weight] if weight.ndim == 3 else weight  # one scale, or one for each row
        assert max(map(distinct, groups)) <= most


def test_serialization_and_tree_at(getkey):
    make = lambda: eqx.nn.Sequential(make_back(getkey, "float32"))
    network, other = make(), make()
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, network)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, other), network)
    weight = jnp.ones_like(network[2].weight)
    changed = eqx.tree_at(lambda network: network[2].weight, network, weight)
    assert changed[2].layer.weight is weight
    assert changed[2].bias is network[2].bias


# ---------------------------------------------------------------- quantizers


@pytest.mark.slow
def test_scales_of_lsq(getkey):
    x = jr.normal(getkey(), (6, 5, 2), "float32")
    for options, largest in (((2, True), 1), ((4, True), 7), ((4, False), 15)):
        bits, signed = options
        quantizer = nn.LSQ(bits, signed=signed).fit(x)
        expected = 2 * np.abs(x).mean() / np.sqrt(largest)
        np.testing.assert_allclose(quantizer.scale, expected, rtol=1e-6)
        assert quantizer.fit(2 * x) is quantizer
        assert distinct(quantizer(x)) <= 2**bits
    of_channels = nn.LSQ(2, channel_axis=1).fit(x)
    assert of_channels.scale.shape == (1, 5, 1)
    for i in range(5):
        alone = nn.LSQ(2).fit(x[:, i])
        np.testing.assert_allclose(of_channels.scale[0, i, 0], alone.scale, rtol=1e-6)
        assert_close(of_channels(x)[:, i], alone(x[:, i]), tolerance=1e-6)
    assert nn.LSQ(2).fit(jnp.zeros((3, 2))).scale > 0
    with pytest.raises(RuleError, match="nothing to fit a scale to"):
        nn.LSQ(2).fit(jnp.zeros((0, 2)))


def test_a_scale_that_training_made_negative(getkey):
    x = jr.normal(getkey(), (50,), "float32")
    for quantizer in (nn.LSQ(3, scale=0.2), nn.FakeQuantize(3, scale=0.2, learn_scale=True)):
        loss = lambda scale, q=quantizer: jnp.sum(
            jnp.sin(eqx.tree_at(lambda q: q.scale, q, scale)(x))
        )
        both = jax.jit(jax.value_and_grad(loss))
        value, slope = both(jnp.array(0.2))
        assert both(jnp.array(-0.2)) == (value, -slope)
        assert slope != 0
        assert jnp.isfinite(both(jnp.array(0.0))[0])


@pytest.mark.slow
def test_fake_quantize(getkey):
    x = jr.normal(getkey(), (6, 5), "float32")
    dynamic = nn.FakeQuantize(4, channel_axis=-1)
    assert dynamic.scale is None
    assert dynamic.fit(x) is dynamic
    scale = np.abs(x).max(0, keepdims=True) / 7
    assert_close(dynamic(x), jnp.asarray(np.round(x / scale) * scale), tolerance=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: dynamic(x).sum())(x), jnp.ones_like(x))

    learned = nn.FakeQuantize(4, channel_axis=-1, learn_scale=True).fit(x)
    np.testing.assert_allclose(learned.scale, scale, rtol=1e-6)
    given = nn.FakeQuantize(4, scale=learned.scale)
    assert given.fit(2 * x) is given
    np.testing.assert_array_equal(given(x), learned(x))
    loss = lambda quantizer: jnp.sum(quantizer(1.5 * x))
    assert not eqx.filter_grad(loss)(given).scale.any()
    plain = lambda scale: jnp.sum(plain_fake_quantize(1.5 * x, scale, -8, 7))
    assert_close(
        eqx.filter_grad(loss)(learned).scale, jax.grad(plain)(learned.scale), tolerance=1e-4
    )
    assert distinct(nn.FakeQuantize(2, scale=0.3, narrow=True)(x)) == 3
    assert nn.FakeQuantize(2, signed=False)(x).min() == 0


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
    model = nn.QuantizedLinear(
        6,
        2,
        weight_quantizer=nn.FakeQuantize(4, scale=0.1),
        input_quantizer=given,
        key=getkey(),
    )
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
    layer = nn.QuantizedLinear(6, 2, weight_quantizer=make(), key=getkey())
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert paths == [".layer.weight", ".layer.bias", ".weight_quantizer.scale"]


def test_the_largest_is_not_clipped_in_half_precision():
    xs = jnp.asarray(1.03 ** np.arange(40), "bfloat16")
    slopes = jax.jit(jax.vmap(jax.grad(nn.FakeQuantize(12))))(xs)
    np.testing.assert_array_equal(slopes, jnp.ones_like(xs))


def test_straight_through_any_function(getkey):
    x = jr.normal(getkey(), (5,), "float32")
    layer = nn.StraightThrough(jnp.floor, backward=jnp.tanh)
    np.testing.assert_array_equal(layer(x, key=getkey()), jnp.floor(x))
    assert_close(jax.grad(lambda x: layer(x).sum())(x), 1 - jnp.tanh(x) ** 2, tolerance=2e-5)


def test_fsq():
    fsq, of_images = nn.FSQ((4, 3, 5)), nn.FSQ((4, 3, 5), axis=-3)
    assert fsq.num_codes == 60
    everyone = jnp.arange(60)
    outside = jnp.array([-61, -60, -1, 60])
    codes, nothing = jax.jit(lambda: (fsq.decode(everyone), fsq.decode(outside)))()
    assert distinct([hash(code.tobytes()) for code in np.asarray(codes)]) == 60
    assert np.isnan(nothing).all()

    @jax.jit
    def run(codes):
        # What stays apart from the edges of its cell comes back as the code that it is.
        again, indices = fsq.quantize(jnp.arctanh(0.9 * codes))
        images = jnp.moveaxis(codes.reshape(2, 5, 6, 3), -1, -3)
        got, of_pixels = of_images.quantize(images)
        same = of_images.decode(of_pixels, dtype=got.dtype)
        return again, indices, got, same, of_images(images[1])

    again, indices, got, same, one = run(codes)
    np.testing.assert_array_equal(indices, everyone)
    np.testing.assert_array_equal(again, codes)
    assert got.shape == (2, 3, 5, 6)
    np.testing.assert_array_equal(same, got)
    np.testing.assert_array_equal(one, got[1])


# ---------------------------------------------------------------- the codebook


def nearest(z, codebook):
    """By all distances, in double precision."""
    z, codebook = np.asarray(z, "float64"), np.asarray(codebook, "float64")
    return ((z[:, None] - codebook) ** 2).sum(-1).argmin(1)


@pytest.mark.slow
def test_entries_and_losses(getkey):
    vq = nn.VectorQuantizer(7, 3, commitment=0.3, ema=False, key=getkey())
    z = jr.normal(getkey(), (20, 3), vq.codebook.dtype)
    value, indices, codebook_loss, commitment_loss = vq.quantize(z)
    np.testing.assert_array_equal(indices, nearest(z, vq.codebook))
    np.testing.assert_array_equal(value, vq.codebook[indices])
    np.testing.assert_array_equal(vq(z), value)
    np.testing.assert_array_equal(vq.decode(indices), value)
    assert jnp.isnan(vq.decode(jnp.array([-8, -7, -1, 7]))).all()
    distance = np.mean((np.asarray(z) - np.asarray(value)) ** 2)
    np.testing.assert_allclose(codebook_loss, distance, rtol=1e-5)
    np.testing.assert_allclose(commitment_loss, 0.3 * distance, rtol=1e-5)

    def loss(args):
        vq, z = args
        value, _, *losses = vq.quantize(z)
        return jnp.sum(jnp.sin(value)) + sum(losses)

    grad_vq, grad_z = eqx.filter_grad(loss)((vq, z))
    difference = np.asarray(z) - np.asarray(value)
    of_z = np.cos(value) + 0.3 * 2 * difference / z.size
    of_codebook = np.zeros((7, 3))
    np.add.at(of_codebook, np.asarray(indices), -2 * difference / z.size)
    np.testing.assert_allclose(grad_z, of_z, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad_vq.codebook, of_codebook, rtol=1e-5, atol=1e-6)
    assert not grad_vq.usage.any()

    moving = nn.VectorQuantizer(7, 3, ema=True, key=getkey())
    assert moving.quantize(z).codebook_loss == 0
    assert not eqx.filter_grad(loss)((moving, z))[0].codebook.any()


@pytest.mark.slow
def test_moving_averages(getkey):
    """The counts and the sums of the paper, in NumPy."""
    vq = nn.VectorQuantizer(4, 2, ema=True, decay=0.9, dtype="float32", key=getkey())
    # The last entry is out of reach.
    vq = eqx.tree_at(lambda vq: vq.codebook, vq, vq.codebook.at[3].set(100.0))
    zs = jr.normal(getkey(), (6, 30, 2), "float32")
    counts = np.full(4, 30 / 4)
    sums = counts[:, None] * np.asarray(vq.codebook, "float64")
    for z in zs:
        index = nearest(z, sums / counts[:, None])
        one_hot = np.eye(4)[index]
        counts = 0.9 * counts + 0.1 * one_hot.sum(0)
        sums = 0.9 * sums + 0.1 * one_hot.T @ np.asarray(z, "float64")

    def step(vq, z):
        return vq.updated(z.reshape(5, 6, 2)), vq.perplexity()

    last, perplexity = eqx.filter_jit(lambda vq: jax.lax.scan(step, vq, zs))(vq)
    np.testing.assert_allclose(last.usage, counts / 30, rtol=1e-5)
    np.testing.assert_allclose(last.codebook, sums / counts[:, None], rtol=1e-4)
    np.testing.assert_array_equal(last.codebook[3], vq.codebook[3])
    assert perplexity[0] == pytest.approx(4)
    assert perplexity[-1] < 4
    assert eqx.tree_equal(vq.updated(zs[0, :0]), vq)
    by_gradient = nn.VectorQuantizer(4, 2, ema=False, key=getkey())
    assert by_gradient.updated(zs[0]).codebook is not None
    np.testing.assert_array_equal(by_gradient.updated(zs[0]).codebook, by_gradient.codebook)
    grad = jax.grad(lambda z: jnp.sum(vq.updated(z).codebook))(zs[0])
    assert not grad.any()


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


@pytest.mark.slow
def test_the_layers_of_equinox_with_other_weights(getkey):
    key, x = getkey(), jr.normal(getkey(), (6,))
    linear = eqx.nn.Linear(6, 3, key=key)
    scale = 0.05
    grid = jnp.asarray(np.clip(np.round(np.asarray(linear.weight) / scale), -8, 7) * scale)
    expected = eqx.tree_at(lambda layer: layer.weight, linear, grid.astype(x.dtype))(x)
    quantizer = nn.FakeQuantize(4, scale=scale)
    for layer in (
        nn.QuantizedLinear(6, 3, weight_quantizer=quantizer, key=key),
        nn.QuantizedLinear.from_layer(linear, weight_quantizer=quantizer),
    ):
        assert eqx.tree_equal(layer.layer, linear)
        assert_close(layer(x), expected, tolerance=1e-5)
    as_it_is = nn.QuantizedLinear.from_layer(linear, weight_quantizer=None)
    np.testing.assert_array_equal(as_it_is(x), linear(x))

    size = np.abs(linear.weight)
    signs = np.where(np.asarray(linear.weight) < 0, -1.0, 1.0)
    of_bits = nn.BinaryLinear.from_layer(linear)
    np.testing.assert_allclose(
        of_bits.quantized_weight(), signs * size.mean(1, keepdims=True), rtol=1e-6
    )
    plain = nn.BinaryLinear(6, 3, scale=False, key=key)
    np.testing.assert_array_equal(plain.quantized_weight(), signs)
    keep = size > 0.7 * size.mean(1, keepdims=True)
    mean = (size * keep).sum(1, keepdims=True) / keep.sum(1, keepdims=True)
    of_three = nn.TernaryLinear.from_layer(linear)
    np.testing.assert_allclose(of_three.quantized_weight(), signs * keep * mean, rtol=1e-6)
    given = nn.TernaryLinear.from_layer(linear, threshold=0.1, scale=False)
    np.testing.assert_array_equal(given.quantized_weight(), signs * (size > 0.1))
    empty = eqx.tree_at(lambda layer: layer.weight, linear, jnp.zeros_like(linear.weight))
    with pytest.warns(UserWarning, match="will not learn"):
        assert not nn.TernaryLinear.from_layer(empty).quantized_weight().any()


def test_sizes_and_options_of_linear_layers(getkey):
    linear = eqx.nn.Linear("scalar", 3, key=getkey())
    for layer in (
        nn.QuantizedLinear.from_layer(linear, weight_quantizer=None),
        nn.BinaryLinear.from_layer(linear),
        nn.TernaryLinear.from_layer(linear),
    ):
        assert (layer.in_features, layer.out_features) == ("scalar", 3)
        assert layer(jnp.array(0.5)).shape == (3,)
    for kind in (nn.BinaryLinear, nn.TernaryLinear):
        for option in ({"dtype": jnp.float16}, {"use_bias": False}, {"key": getkey()}):
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                kind.from_layer(linear, **option)
        layer = kind.from_layer(
            linear, scale=False, backward="identity", input_quantizer=ste.binary_sign
        )
        assert (layer.scale, layer.backward) == (False, "identity")
        np.testing.assert_array_equal(layer(jnp.array(0.5)), layer(jnp.array(7.0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (1, {"stride": 2, "dilation": 2, "padding": 3, "padding_mode": "CIRCULAR"}),
        (2, {"groups": 2, "padding": "SAME", "use_bias": False}),
        pytest.param(3, {}, marks=pytest.mark.slow),
    ],
)
def test_convolutions(dims, options, getkey):
    make = (eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d)[dims - 1]
    key, x = getkey(), jr.normal(getkey(), (2, *(5,) * dims))
    conv = make(2, 4, 2, **options, key=key)
    quantizers = {
        "weight_quantizer": nn.LSQ(2, channel_axis=0),
        "input_quantizer": nn.FakeQuantize(3, scale=0.5),
    }
    swapped = nn.QuantizedConv.from_layer(conv, **quantizers)
    made = nn.QuantizedConv(dims, 2, 4, 2, **options, **quantizers, key=key)
    assert type(swapped.layer) is make
    assert swapped.weight is conv.weight
    weight = np.asarray(swapped.quantized_weight())
    assert max(map(distinct, weight)) <= 4
    grid = np.clip(np.round(np.asarray(x) / 0.5), -4, 3) * 0.5
    plain = eqx.tree_at(lambda conv: conv.weight, conv, jnp.asarray(weight))
    expected = plain(jnp.asarray(grid, x.dtype))
    assert_close((swapped(x), made(x)), (expected, expected), tolerance=1e-6)


def test_any_function_is_a_quantizer(getkey):
    x = jr.normal(getkey(), (3,))
    learned = nn.StraightThrough(jnp.sign, backward=eqx.nn.PReLU(0.1))
    dorefa = ft.partial(ste.dorefa, bits=2)
    for quantizer in (ste.binary_sign, dorefa, learned):
        make = lambda key, q=quantizer: nn.QuantizedLinear(3, 2, weight_quantizer=q, key=key)
        layer = make(getkey())
        np.testing.assert_array_equal(layer.quantized_weight(), quantizer(layer.weight))
        of_two = lambda keys, make=make: eqx.filter_vmap(lambda member: member(x))(
            eqx.filter_vmap(make)(keys)
        )
        outputs = eqx.filter_eval_shape(of_two, jr.split(getkey(), 2))
        assert outputs.shape == (2, 2)
        if quantizer is not learned:  # layers that are scanned over may hold arrays only
            assert all(eqx.is_array(leaf) for leaf in jax.tree.leaves(layer))


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
    return {row.path: (row.new, row.weights, row.inputs) for row in report.swapped}


def left(report):
    return {row.path: row.note for row in report.left}


def test_rules():
    model = blank(Model)
    new, report = nn.quantize_model(
        model,
        {
            "heads['a']": None,
            "heads": nn.LSQ(8, channel_axis=0),
            "blocks[1].*.output_proj": nn.BinaryLinear,
            eqx.nn.MultiheadAttention: (nn.LSQ(4), nn.FakeQuantize(6)),
            "blocks[0].feed.layers[?]": (ste.binary_sign, None),
            "*": ft.partial(nn.TernaryLinear.from_layer, scale=False),
        },
    )
    attention = {
        f"blocks[{i}].attention.{name}_proj": (
            "QuantizedLinear",
            "4 bits signed",
            "6 bits signed",
        )
        for i in (0, 1)
        for name in ("query", "key", "value", "output")
    }
    assert swapped(report) == {
        **attention,
        "blocks[0].feed.layers[0]": ("QuantizedLinear", "binary_sign", ""),
        "blocks[0].feed.layers[1]": ("QuantizedLinear", "binary_sign", ""),
        "blocks[1].attention.output_proj": ("BinaryLinear", "1 bit", ""),
        "blocks[1].feed.layers[0]": ("TernaryLinear", "1.58 bits", ""),
        "blocks[1].feed.layers[1]": ("TernaryLinear", "1.58 bits", ""),
        "heads['b']": ("QuantizedLinear", "8 bits signed", ""),
    }
    reason = "not of a Linear or Conv"
    norms = {f"blocks[{i}].norm.{name}": reason for i in (0, 1) for name in ("weight", "bias")}
    assert left(report) == {**norms, "heads['a']": "rule 0, \"heads['a']\""}
    # What was not swapped is the object that it was.
    assert new.blocks[0].norm is model.blocks[0].norm
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
        "  [0]  Conv2d -> QuantizedConv  weights 2 bits signed  inputs 8 bits signed  "
        "(2, 1, 3, 3)\n"
        "left: 3\n"
        "  [1]            Linear   (6, 5)  no rule\n"
        "  [2].weight_ih  float32  (9, 2)  not of a Linear or Conv\n"
        "  [2].weight_hh  float32  (9, 3)  not of a Linear or Conv"
    )
    linear = model[1]
    new, report = nn.quantize_model(linear, {"*": nn.LSQ(2)})
    assert isinstance(new, nn.QuantizedLinear)
    assert "(the model)  Linear -> QuantizedLinear" in str(report)
    again, report = nn.quantize_model([new, linear], {"*": nn.BinaryLinear})
    assert again[0] is new
    assert left(report) == {"[0]": "quantized already"}
    for again in (new, [new], {"a": [new]}):
        with raises("only layers that are quantized already: rule 0(?s:.)*Linear`"):
            nn.quantize_model(again, {eqx.nn.Linear: nn.LSQ(2)})
    with raises("the model itself is a `QuantizedLinear`"):
        nn.quantize_model(new, {"*": nn.LSQ(2)})
    with raises("matches no layer: rule 0, 'b'(?s:.)*there is `..a..`, QuantizedLinear"):
        nn.quantize_model({"a": new}, {"b": nn.LSQ(2)})
    with raises("for the model itself, a `Linear`, it returned ArrayImpl"):
        nn.quantize_model(linear, {"*": lambda layer: layer.weight})
    with raises("It was to take the place of the model itself by rule 0"):
        nn.quantize_model(OwnCall(2, 3, key=jr.key(0)), {"*": nn.LSQ(2)})
    with raises("there is the model itself, Linear"):
        nn.quantize_model(linear, {"a": nn.LSQ(2)})


def test_the_traceback_has_no_frames_of_the_walk(getkey):
    model = [[[eqx.nn.Linear(2, 2, key=getkey())]]]

    def fails(layer):
        raise KeyError("mine")

    for rule in ((None, nn.LSQ(4)), fails):
        with raises("rule 0") as caught:
            nn.quantize_model(model, {"*": rule})
        names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "visit" not in names
        assert "_new" in names
    assert isinstance(caught.value.__cause__, KeyError)
    names = [f.name for f in traceback.extract_tb(caught.value.__cause__.__traceback__)]
    assert names[-1] == "fails"


def test_a_rule_for_an_array(getkey):
    model = {"pos": jr.normal(getkey(), (3, 2)), "linear": eqx.nn.Linear(2, 2, key=getkey())}
    for which in ("['pos']", "*pos*"):
        with pytest.raises(
            RuleError,
            match=r"an array, and no layer(?s:.)*pos'.` is float(?s:.)*where the model",
        ):
            nn.quantize_model(model, {which: nn.LSQ(4)})


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
        linear: eqx.nn.Linear | nn.QuantizedLinear

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


class OwnCall(eqx.nn.Linear):
    def __call__(self, x, *, key=None):
        return 2 * x


@pytest.fixture
def unchecked():
    """As users have it, whose calls nothing checks against the annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


KEY = jr.key(0)
make_vq = ft.partial(nn.VectorQuantizer, 4, 3, key=KEY)
REFUSED = [
    *[(kind, "bits", x) for kind in (nn.FakeQuantize, nn.LSQ) for x in (2.5, "4", None, True)],
    *[(kind, "channel_axis", 0.0) for kind in (nn.FakeQuantize, nn.LSQ)],
    *[(nn.LSQ, "gradient_scale", x) for x in ("a", -1, 0.0, np.nan)],
    *[(nn.FSQ, "levels", x) for x in (8, (8, 2.5), (8, "5"), (8, True))],
    (ft.partial(nn.FSQ, (3, 3)), "axis", "last"),
    *[(make_vq, name, x) for name in ("commitment", "dead_below") for x in (-1, "a", np.inf)],
    *[(make_vq, "decay", x) for x in (-0.1, None)],
    (ft.partial(nn.VectorQuantizer, size=3, key=KEY), "num_entries", 2.0),
    *[(nn.StraightThrough, "fn", x) for x in (None, "sign")],
    (ft.partial(nn.StraightThrough, jnp.sign), "backward", "foo"),
    *[
        (ft.partial(nn.TernaryLinear, 3, 2, key=KEY), "threshold", x)
        for x in (-1, "median", None, np.nan)
    ],
    *[
        (ft.partial(kind, 3, 2, key=KEY), "backward", x)
        for kind in (nn.BinaryLinear, nn.TernaryLinear)
        for x in ("foo", None)
    ],
]


def name_of(make):
    return getattr(make, "func", make).__name__


@pytest.mark.parametrize(
    ("make", "option", "value"), REFUSED, ids=lambda x: name_of(x) if callable(x) else None
)
def test_options_that_are_refused(make, option, value, unchecked):
    refused = f"can't be made with this `{option}`.\n  it is "
    if option in ("bits", "levels"):  # as `eqx_grads.ste` refuses them
        refused = f"can't quantize to th(?s:.)*`{option}` is "
    with raises(f"`{name_of(make)}` {refused}"):
        make(**{option: value})


class TestErrors:
    def test_quantizers(self):
        with raises(r"`LSQ` has no scale yet(?s:.)*float32\[3\](?s:.)*quantizer.fit"):
            nn.LSQ(2)(jnp.ones(3, "float32"))
        with raises("`FakeQuantize` has no scale yet"):
            nn.FakeQuantize(2, learn_scale=True)(jnp.ones(3))
        with raises("`LSQ` was given a scale that is not positive(?s:.)*smallest is 0.0"):
            nn.LSQ(2, scale=0.0)
        with raises("`FakeQuantize` was given a scale that is not positive"):
            nn.FakeQuantize(2, scale=jnp.array([1.0, -2.0]))
        with raises("`FakeQuantize` can't quantize(?s:.)*`bits` is 1, `signed` is True"):
            nn.FakeQuantize(1)
        with raises("`LSQ` can't quantize(?s:.)*from 1 to 24"):
            nn.LSQ(25, signed=False)
        for kind in (nn.LSQ, nn.FakeQuantize):
            for scale in (np.inf, jnp.array([1.0, jnp.nan])):
                with raises(
                    f"`{kind.__name__}` was given a scale that is not positive and fin"
                ):
                    kind(2, scale=scale)
        with raises("without the axis of its channels(?s:.)*`channel_axis` is 2"):
            nn.LSQ(2, channel_axis=2).fit(jnp.ones((3, 2)))

    def test_what_quantizers_are_fitted_to(self, unchecked):
        for make in (nn.LSQ, ft.partial(nn.FakeQuantize, learn_scale=True)):
            name = name_of(make)
            for x in ([1.0, 2.0], jnp.array([1, 2]), jnp.array([1j])):
                with raises(rf"`{name}.fit` was given (?s:.)*`x` is (list|int|complex)"):
                    make(2).fit(x)
        assert nn.LSQ(np.int64(2), channel_axis=np.int32(0)) == nn.LSQ(2, channel_axis=0)

    def test_vectors_and_indices(self, unchecked):
        for layer in (nn.FSQ((3, 3, 3), axis=-2), make_vq(axis=-2)):
            name = type(layer).__name__
            calls = (layer, layer.quantize, getattr(layer, "updated", layer))
            for call in calls:
                for shape in ((), (3,), (2, 5)):
                    with raises(
                        f"`{name}` was given an array without vectors of its size"
                        "(?s:.)*`axis` is -2, and the size is 3"
                    ):
                        call(jnp.ones(shape))
            for indices in (1.0, jnp.ones(3), True, -1):
                with raises(f"`{name}.decode` was given(?s:.)*with 1 axes or more"):
                    layer.decode(indices)
            with raises(f"`{name}` was given something that is not an array of floats"):
                layer([1.0, 2.0])
        assert nn.FSQ(np.array([4, 3])) == nn.FSQ((np.int32(4), 3)) == nn.FSQ((4, 3))
        assert jnp.isnan(nn.FSQ((3, 3)).decode(-1)).all()

    def test_sizes_of_inputs(self, getkey):
        key = getkey()
        match = r"was given an input of the wrong size(?s:.)*`in_features` is 4(?s:.)*vmap"
        for layer in (
            nn.QuantizedLinear(4, 2, weight_quantizer=None, key=key),
            nn.BinaryLinear(4, 2, key=key),
            nn.TernaryLinear(4, 2, key=key),
        ):
            for shape in ((), (3,), (4, 4)):
                with raises(f"`{type(layer).__name__}` {match}"):
                    layer(jnp.ones(shape))
        with raises("`in_features` is 'scalar'\nGive it a scalar, and"):
            nn.BinaryLinear("scalar", 2, key=key)(jnp.ones(1))

    def test_codebooks(self, getkey):
        with raises(r"can't quantize to these levels(?s:.)*\(1, 5\)"):
            nn.FSQ((1, 5))
        with raises("`FSQ` was given an axis that is not counted from the end"):
            nn.FSQ((3, 5), axis=0)
        with raises("`decay` is 1.0"):
            nn.VectorQuantizer(3, 2, decay=1.0, key=getkey())
        vq = nn.VectorQuantizer(3, 2, key=getkey())
        with raises(r"`VectorQuantizer` was given(?s:.)*\[5,3\], `axis` is -1(?s:.)*size is 2"):
            vq(jnp.ones((5, 3)))

    def test_layers(self, getkey):
        key = getkey()
        linear = eqx.nn.Linear(2, 3, key=key)
        with raises(
            "`input_quantizer` of `QuantizedLinear` has no scale.\n  it is an `LSQ` that"
        ):
            nn.QuantizedLinear(2, 3, weight_quantizer=None, input_quantizer=nn.LSQ(2), key=key)
        with raises("The `weight_quantizer` of `QuantizedConv` is not a quantizer"):
            nn.QuantizedConv(1, 2, 3, 2, weight_quantizer=nn.LSQ, key=key)
        summed = nn.QuantizedLinear.from_layer(linear, weight_quantizer=jnp.sum)
        with raises("The weight quantizer did not return an array like"):
            summed(jnp.ones(2))
        with raises("`BinaryLinear.from_layer` was given(?s:.)*the layer is a `OwnCall`"):
            nn.BinaryLinear.from_layer(OwnCall(2, 3, key=key))
        with raises("the layer is a `Linear`(?s:.)*`equinox.nn.Conv`"):
            nn.QuantizedConv.from_layer(linear, weight_quantizer=None)

    def test_rules(self, getkey):
        model = blank(Model)
        with raises(
            r"matches no layer: rule 1, 'head.a'\.(?s:.)*there is `heads\['a'\]`, Linear"
        ):
            nn.quantize_model(model, {"*": None, "head.a": nn.LSQ(2)})
        with raises("matches no layer: rule 0, Conv(?s:.)*is `blocks.0..attention.query_proj`"):
            nn.quantize_model(model, {eqx.nn.Conv: nn.LSQ(2)})
        with raises(
            "matches no layer: rule 0, '\\*'(?s:.)*GRUCell`, call a quantizer in the loss"
        ):
            nn.quantize_model(eqx.nn.GRUCell(2, 3, key=getkey()), {"*": nn.LSQ(2)})
        with raises(
            "is never used: rule 1, .heads..a...(?s:.)*The first rule that matches wins"
        ):
            nn.quantize_model(model, {eqx.nn.Linear: nn.LSQ(2), "heads['a']": None})
        with raises("does not say how to quantize: rule 0(?s:.)*it is 4"):
            nn.quantize_model(model, {"*": 4})
        with raises("does not say which layers it is for: rule 0, 3"):
            nn.quantize_model(model, {3: nn.LSQ(2)})
        with raises(r"did not return a quantized layer(?s:.)*write `\(fn, None\)`"):
            nn.quantize_model(model, {"heads": ste.binary_sign})
        convs = [eqx.nn.Conv1d(1, 1, 1, key=getkey())]
        with raises("the layer is a `Conv1d`(?s:.)*take the place of `.0.` by rule 0, '.0.'"):
            nn.quantize_model(convs, {"[0]": nn.BinaryLinear})
        owns = [OwnCall(2, 3, key=getkey())]
        with raises("the layer is a `OwnCall`"):
            nn.quantize_model(owns, {eqx.nn.Linear: nn.LSQ(2)})


# ---------------------------------------------------------------- digits


def train(model, images, labels, *, steps, key, rate=1e-2):
    """Adam, with the weights of each layer clipped to [-1, 1] after each step."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    clip = lambda x: jnp.clip(x, -1, 1) if eqx.is_array(x) and x.ndim == 2 else x

    def loss(model, images, labels):
        log_p = jax.nn.log_softmax(jax.vmap(model)(images))
        return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()

    def step(carry, key):
        arrays, state = carry
        key1, key2 = jr.split(key)
        batch = jr.randint(key1, (64,), 0, len(images))
        noisy = images[batch] + 0.1 * jr.normal(key2, (64, 64), images.dtype)
        grads = eqx.filter_grad(loss)(eqx.combine(arrays, static), noisy, labels[batch])
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state)
        return (jax.tree.map(clip, eqx.apply_updates(arrays, updates)), state), None

    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    carry = (arrays, optimizer.init(arrays))
    (arrays, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, jr.split(key, steps)))(carry)
    return eqx.combine(arrays, static)


@pytest.fixture(scope="module")
def digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    split = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    return (images, labels), (test_images, test_labels)


def accuracy(model, test):
    return float((jax.vmap(model)(test[0]).argmax(1) == test[1]).mean())


@pytest.mark.slow
def test_a_network_of_binary_layers_reads_digits(digits):
    training, test = digits
    accuracies, values = [], set()
    for seed in range(3):
        keys = jr.split(jr.key(seed), 4)
        layers = []
        for i, (n_in, n_out) in enumerate([(64, 128), (128, 128), (128, 10)]):
            layers += [
                nn.BinaryLinear(n_in, n_out, False, "float32", scale=False, key=keys[i]),
                eqx.nn.LayerNorm(n_out, dtype="float32"),
                nn.StraightThrough(jnp.sign, backward="hard_tanh"),
            ]
        model = eqx.nn.Sequential(layers[:-1])
        model = train(model, *training, steps=1260, key=keys[3])
        accuracies.append(accuracy(model, test))
        values |= {distinct(layer.quantized_weight()) for layer in model[::3]}
    assert np.median(accuracies) >= 0.965, accuracies
    assert values == {2}


@pytest.mark.slow
def test_a_trained_model_goes_on_with_two_bits(digits):
    """Two bits of weights and of activations: what is lost by the swap is learned again."""
    training, test = digits
    before, after, values = [], [], set()
    for seed in range(3):
        key1, key2, key3 = jr.split(jr.key(seed), 3)
        model = eqx.nn.MLP(64, 10, 128, 2, dtype="float32", key=key1)
        model = train(model, *training, steps=600, key=key2)
        rules = {
            "layers[0]": nn.LSQ(2),
            eqx.nn.Linear: (nn.LSQ(2), nn.LSQ(2, signed=False, scale=0.5)),
        }
        model, report = nn.quantize_model(model, rules)
        assert len(report.swapped) == 3
        before.append(accuracy(model, test))
        model = train(model, *training, steps=1260, key=key3, rate=3e-3)
        after.append(accuracy(model, test))
        values |= {distinct(layer.quantized_weight()) for layer in model.layers}
    assert np.median(after) >= 0.975, after
    assert np.median(before) < np.median(after)
    assert max(values) == 4


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
