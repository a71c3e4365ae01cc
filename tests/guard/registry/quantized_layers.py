"""Quantized layers and quantizers, against the papers' straight-through formulas."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from . import straight_through as formulas
from .entry import entry
from .over_time import CHEAP, draws


# A line has as many arguments as there is room for.
# fmt: off
nn = eqg.nn
stop = jax.lax.stop_gradient
normal = draws(3)
SOME = {**CHEAP, "orders": ("value", "jvp", "vjp", "RR")}
VALUE = {**CHEAP, "orders": ("value",)}


# ---------------------------------------------------------------- the formulas


def limits(bits, signed=True, narrow=False):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return low + narrow, high


def fake_quantize(x, scale, low, high):
    return formulas.fake_quantize(low, high, x, scale, 0 * scale)


def lsq(x, scale, low, high, gain=None):
    gain = 1 / np.sqrt(x.size / scale.size * high) if gain is None else gain
    return formulas.lsq(gain, low, high, x, scale)


def absmax(x, high, axis=None):
    return stop(jnp.max(jnp.abs(x), axis, keepdims=axis is not None) / high)


def sign(w):
    smooth = jnp.clip(w, -1, 1)
    return smooth + stop(jnp.where(w < 0, -1, 1).astype(w.dtype) - smooth)


def ternary(w, threshold):
    smooth = jnp.clip(w, -1, 1)
    return smooth + stop(jnp.where(jnp.abs(w) > threshold, jnp.sign(w), 0) - smooth)


# ---------------------------------------------------------------- quantizers

# Beyond the range, in the last half step of it, and a negative number.
X = np.array([[0.52, -1.23, 1.6, 40.0, 2.26], [-0.1, 0.9, -30.0, -2.62, 2.9]])
SCALES = np.array([[0.31], [0.23]])
for name, options in (
    ("nn.FakeQuantize", {}), ("nn.FakeQuantize: narrow", {"narrow": True}),
    ("nn.FakeQuantize: unsigned", {"signed": False}),
):
    entry(name, lambda x, s, o=options: nn.FakeQuantize(4, scale=s, learn_scale=True, **o)(x),
        X, SCALES if options else np.array(0.31),
        plain=lambda x, s, o=options: fake_quantize(x, s, *limits(4, **o)), **SOME)
for name, axis in (("dynamic", None), ("a scale for each row", 0), ("each column", -1)):
    axes = {None: None, 0: 1, -1: 0}[axis]
    entry(f"nn.FakeQuantize: {name}",
        lambda x, axis=axis: nn.FakeQuantize(3, channel_axis=axis)(x), X,
        plain=lambda x, axes=axes: fake_quantize(x, absmax(x, 3, axes), -4, 3), **SOME)


def asymmetric(x):
    """For the range of each row, integers from -4 to 3; for all numbers, from 1 to 7."""
    fitted = nn.FakeQuantize(3, asymmetric=True, learn_scale=True, channel_axis=0).fit(x)
    stored = nn.FakeQuantize(3, asymmetric=True, signed=False, narrow=True).encode(x)
    return fitted(x), fitted.zero_point, stored


def asymmetric_plain(x):
    low, high = (stop(f(x, 1, keepdims=True)) for f in (jnp.min, jnp.max))
    zero = -4 - jnp.round(low / ((high - low) / 7))
    u = x / ((high - low) / 7)
    q = stop(jnp.clip(jnp.round(u), -4 - zero, 3 - zero))
    inside = stop(jnp.round(u)) == q
    y = jnp.where(inside, u + stop(q - u), q) * ((high - low) / 7)
    scale = stop(jnp.max(x) - jnp.min(x)) / 6
    point = 1 - jnp.round(stop(jnp.min(x)) / scale)
    codes = jnp.clip(jnp.round(stop(x) / scale) + point, 1, 7).astype("uint8")
    return y, zero.astype("int32"), (codes, scale, point.astype("uint8"))


entry("nn.FakeQuantize: asymmetric", asymmetric, X, plain=asymmetric_plain,
    **{**CHEAP, "orders": ("value", "vjp")})
entry("nn.FakeQuantize: a constant scale",
    lambda x, s: (nn.FakeQuantize(5, scale=0.3)(x), nn.FakeQuantize(5, scale=s)(x)), X, SCALES,
    plain=lambda x, s: (
        fake_quantize(x, jnp.full((), 0.3, x.dtype), -16, 15),
        fake_quantize(x, stop(s), -16, 15),
    ), **SOME)
for name, options in (
    ("nn.LSQ", {}), ("nn.LSQ: unsigned", {"signed": False}),
    ("nn.LSQ: a gain", {"gradient_scale": 0.37}),
):
    entry(name, lambda x, s, o=options: nn.LSQ(4, scale=s, **o)(x), X, SCALES,
        plain=lambda x, s, o=options: lsq(
            x, s, *limits(4, o.get("signed", True)), o.get("gradient_scale")
        ), **SOME)


def of_negative_scale(x, s):
    quantizer = eqx.tree_at(lambda q: q.scale, nn.LSQ(4, scale=1.0), -s)
    return quantizer(x), quantizer.encode(x)


def integers(x, scale, low, high, dtype="int8"):
    return stop(jnp.clip(jnp.round(x / scale), low, high)).astype(dtype)


entry("nn.LSQ: a scale that has become negative", of_negative_scale, X, np.array(0.31),
    plain=lambda x, s: (lsq(x, s, -8, 7), (integers(x, s, -8, 7), s)), **CHEAP)


def fits(x):
    """Scales that are chosen, also for zeros, and the integers in them."""
    rows = nn.FakeQuantize(3, learn_scale=True, channel_axis=0).fit(x)
    steps = nn.LSQ(3, channel_axis=1).fit(x)
    one = nn.LSQ(5, signed=False).fit(x)
    wide = nn.FakeQuantize(12, scale=0.3, signed=False)
    found = rows.scale, steps.scale, one.scale, nn.LSQ().fit(0 * x).scale > 0
    return found, nn.Ternary()(0 * x), rows.encode(x), wide.encode(x)


def fits_plain(x):
    size = jnp.abs(x)
    rows = absmax(x, 3, 1)
    steps, one = 2 * jnp.mean(size, 0, keepdims=True) / 3**0.5, 2 * jnp.mean(size) / 31**0.5
    return (
        (rows, steps, one, np.array(True)), 0 * x, (integers(x, rows, -4, 3), rows),
        (integers(x, 0.3, 0, 4095, "uint16"), jnp.full((), 0.3, x.dtype)),
    )


entry("nn.LSQ: fit", fits, X, plain=fits_plain, **VALUE)
def grouped(x, s):
    """A scale for two neighbors, given and computed, and stored once."""
    given, dynamic = nn.LSQ(4, scale=s), nn.FakeQuantize(3, group_size=2)
    return given(x), dynamic(x), given.encode(x), nn.LSQ(4, group_size=2).fit(x).scale


def grouped_plain(x, s):
    pairs = x.reshape(2, 2, 2)

    def each(fn, scales):
        found = [[fn(pairs[i, j], scales[i, j]) for j in range(2)] for i in range(2)]
        return jnp.stack([jnp.concatenate(row) for row in found])

    gain = 1 / np.sqrt(2 * 7)
    given = each(lambda x, s: lsq(x, s, -8, 7, gain), s)
    dynamic = each(lambda x, s: fake_quantize(x, s, -4, 3), absmax(pairs, 3, 2)[..., 0])
    codes = each(lambda x, s: integers(x, s, -8, 7), s)
    return given, dynamic, (codes, s), 2 * jnp.mean(jnp.abs(stop(pairs)), 2) / 7**0.5


entry("nn.LSQ: groups", grouped, X[:, :4], np.array([[0.31, 3.2], [0.23, 1.1]]),
    plain=grouped_plain, **SOME)


# ---------------------------------------------------------------- codebooks

LEVELS = (5, 4, 3)


def fsq_plain(z):
    """Mentzer et al. (2023), with the constants of their code."""
    levels = np.array(LEVELS)
    span, offset = (levels - 1) * (1 - 1e-3) / 2, np.where(levels % 2 == 0, 0.5, 0.0)
    array = lambda x: jnp.asarray(x, z.dtype)[None, None, None]
    z = jnp.moveaxis(z, -3, -1)
    bounded = jnp.tanh(z + array(np.tan(offset / span))) * array(span) - array(offset)
    digits = stop(jnp.round(bounded))
    codes = (bounded + stop(digits - bounded)) / array(levels // 2)
    index = jnp.sum((digits + array(levels // 2)) * array([1, 5, 20]), -1)
    index = stop(index).astype("int32")
    codes = jnp.moveaxis(codes, -1, -3)
    return codes, index, stop(codes)


def fsq(z):
    quantizer = nn.FSQ(LEVELS, axis=-3)
    codes, index = quantizer.quantize(z)
    return codes, index, quantizer.decode(index, dtype=z.dtype)


entry("nn.FSQ", fsq, normal(2, 3, 2, 2, scale=2), plain=fsq_plain, **SOME)


def vector_quantizer(ema, z, codebook, usage):
    made = nn.VectorQuantizer(
        4, 2, ema=ema, commitment=0.4, decay=0.8, dead_below=0.0, axis=-2, key=jr.key(0)
    )
    made = eqx.tree_at(lambda m: (m.codebook, m.usage), made, (codebook, usage))
    new = made.updated(z)
    found = made.quantize(z)
    return tuple(found), made.decode(found.indices), made.perplexity(), new.codebook, new.usage


def vector_quantizer_plain(ema, z, codebook, usage):
    """Van den Oord et al. (2017), with moving averages as in their appendix A.1."""
    z = jnp.moveaxis(z, -2, -1)
    index = jnp.argmin(jnp.sum((z[..., None, :] - codebook[None, None]) ** 2, -1), -1)
    entries = codebook[index]
    value = z + stop(entries - z)
    of_codebook = jnp.zeros((), z.dtype) if ema else jnp.mean((stop(z) - entries) ** 2)
    commitment = 0.4 * jnp.mean((z - stop(entries)) ** 2)
    old, old_usage, rows = stop(codebook), stop(usage), stop(z).reshape(-1, 2)
    ones = jax.nn.one_hot(index.ravel(), 4, dtype=z.dtype)
    new_usage = 0.8 * old_usage + 0.2 * jnp.mean(ones, 0)
    sums = 0.8 * old_usage[:, None] * old + 0.2 * ones.T @ rows / len(rows)
    new = sums / new_usage[:, None] if ema else old
    share = old_usage / jnp.sum(old_usage)
    perplexity = jnp.exp(-jnp.sum(share * jnp.log(share)))
    value, decoded = (jnp.moveaxis(x, -1, -2) for x in (value, entries))
    return (value, index, of_codebook, commitment), decoded, perplexity, new, new_usage


USAGE = np.array([0.1, 0.4, 0.2, 0.3])
for ema in (True, False):
    entry(f"nn.VectorQuantizer: {ema=}",
        lambda z, c, u, ema=ema: vector_quantizer(ema, z, c, u), normal(3, 2, 5), normal(4, 2),
        USAGE, plain=lambda z, c, u, ema=ema: vector_quantizer_plain(ema, z, c, u), **CHEAP)


def codebook_of(z):
    """Fitted to as many finite vectors as it has entries, and an entry that is dead."""
    zs = jnp.concatenate([jnp.full((5, 2), np.nan, z.dtype), z])
    fitted = nn.VectorQuantizer(4, 2, key=jr.key(0)).fit(zs, key=jr.key(1))
    far = eqx.tree_at(
        lambda m: (m.codebook, m.usage), fitted,
        (z.at[2].set(1e3), jnp.asarray([0.3, 0.36, 0.02, 0.32], z.dtype)),
    )
    new, same = far.updated(z[:1]), far.updated(z * np.nan)
    order = jnp.argsort(fitted.codebook[:, 0])
    return fitted.codebook[order], fitted.usage, new.codebook[2], new.usage, same.codebook


def codebook_plain(z):
    usage = 0.99 * jnp.asarray([0.3, 0.36, 0.02, 0.32], z.dtype)
    usage = usage.at[0].add(0.01).at[2].set(0.25)
    quarter = jnp.full(4, 0.25, z.dtype)
    return z[jnp.argsort(z[:, 0])], quarter, z[0], usage, z.at[2].set(1e3)


entry("nn.VectorQuantizer: fit", codebook_of, normal(4, 2), plain=codebook_plain, **VALUE)


# ---------------------------------------------------------------- layers

WEIGHT, BIAS = np.array([[0.45, -0.22, 0.33, 1.7], [0.13, 1.15, -0.61, -0.04]]), normal(2)


row_mean = lambda size: jnp.mean(size, 1, keepdims=True)


def kept_mean(w, threshold):
    kept = stop(jnp.abs(w) > threshold).astype(w.dtype)
    total = jnp.sum(kept * jnp.abs(w), 1, keepdims=True)
    return total / jnp.sum(kept, 1, keepdims=True)


by_mean = lambda w: 0.7 * stop(row_mean(jnp.abs(w)))


def linear(layer, weight, bias):
    fields = lambda layer: (layer.weight, layer.bias)
    return eqx.tree_at(fields, layer, (weight, bias), is_leaf=lambda x: x is None)


of_weight = lambda w: fake_quantize(w, absmax(w, 3, 1), -4, 3)
of_input = lambda x: fake_quantize(x, jnp.full((), 0.35, x.dtype), 0, 15)
QUANTIZERS = nn.FakeQuantize(3, channel_axis=0), nn.FakeQuantize(4, scale=0.35, signed=False)
# Each the quantizers of weight and input, and what they are.
LINEARS = {
    "nn.Quantized": (QUANTIZERS, (of_weight, of_input)),
    "nn.Quantized: functions": ((None, jnp.sin), (lambda w: w, jnp.sin)),
    "nn.Binary": ((nn.Binary(), None), (lambda w: sign(w) * row_mean(jnp.abs(w)), None)),
    "nn.Binary: without a scale": ((nn.Binary(scale=False), None), (sign, None)),
    "nn.Ternary": (
        (nn.Ternary(), None),
        (lambda w: ternary(w, by_mean(w)) * kept_mean(w, by_mean(w)), None),
    ), "nn.Ternary: a threshold": (
        (nn.Ternary(threshold=0.25), None),
        (lambda w: ternary(w, 0.25) * kept_mean(w, 0.25), None),
    ), "nn.Ternary: without a scale": (
        (nn.Ternary(scale=False), None), (lambda w: ternary(w, by_mean(w)), None),
    ),
}
for name, (quantizers, plain) in LINEARS.items():

    def fn(x, weight, bias, quantizers=quantizers):
        layer = linear(eqx.nn.Linear(4, 2, key=jr.key(0)), weight, bias)
        return nn.Quantized(layer, *quantizers)(x)

    def plain_linear(x, weight, bias, plain=plain):
        of_weight, of_input = plain
        return of_weight(weight) @ (x if of_input is None else of_input(x)) + bias

    options = {"transforms": True, "costs": True} if name == "nn.Binary" else {}
    entry(name, fn, normal(4), WEIGHT, BIAS, plain=plain_linear, **(SOME | options))


CONV = {"stride": 2, "padding": ((1, 0),), "dilation": 2, "groups": 2}


def conv(of_weight, x, weight, bias):
    layer = eqx.nn.Conv(1, 4, 2, 3, **CONV, dtype=x.dtype, key=jr.key(0))
    return nn.Quantized(linear(layer, weight, bias), of_weight, QUANTIZERS[1])(x)


def conv_plain(of_weight, x, weight, bias):
    out = jax.lax.conv_general_dilated(
        of_input(x)[None], of_weight(weight), (2,), ((1, 0),), rhs_dilation=(2,),
        feature_group_count=2,
    )
    return out[0] + bias


entry("nn.Quantized: a convolution", lambda *args: conv(QUANTIZERS[0], *args), normal(4, 9),
    normal(2, 2, 3), normal(2, 1), **SOME,
    plain=ft.partial(conv_plain, lambda w: fake_quantize(w, absmax(w, 3, (1, 2)), -4, 3)))


# ---------------------------------------------------------------- models


def network(weights, dtype):
    keys = jr.split(jr.key(0), 3)
    layers = [eqx.nn.Linear(4, 4, key=key, dtype=dtype) for key in keys]
    parts = lambda layers: [part for layer in layers for part in (layer.weight, layer.bias)]
    layers = eqx.tree_at(parts, layers, list(weights))
    return eqx.nn.Sequential([layers[0], eqx.nn.Lambda(jnp.tanh), layers[1], layers[2]])


def rules():
    every = nn.FakeQuantize(3), nn.FakeQuantize(4, scale=0.35)
    return {"layers[3]": None, "layers[2]": nn.Binary(), eqx.nn.Linear: every}


model = lambda x, *weights: nn.quantize_model(network(weights, x.dtype), rules())[0](x)


def stored(x, *weights):
    """The same with weights that are integers."""
    quantized, _ = nn.quantize_model(network(weights, x.dtype), rules())
    stored, _ = nn.to_integers(quantized)
    first, _, second, _ = stored.layers
    found = first.weight, first.weight_quantizer.scale, second.weight
    return stored(x), found, second.weight_quantizer.scale


def model_plain(x, w1, b1, w2, b2, w3, b3):
    x = fake_quantize(x, jnp.full((), 0.35, x.dtype), -8, 7)
    x = jnp.tanh(fake_quantize(w1, absmax(w1, 3), -4, 3) @ x + b1)
    return w3 @ ((sign(w2) * row_mean(jnp.abs(w2))) @ x + b2) + b3


def stored_plain(x, w1, b1, w2, *rest):
    scale, of_signs = absmax(w1, 3), jnp.where(w2 < 0, -1, 1).astype("int32")
    codes = integers(w1, scale, -4, 3, "int32")
    # Two in a byte: those of the first half, and 16 times those of the second.
    pack = lambda codes: (codes[:, :2] % 16 + 16 * (codes[:, 2:] % 16)).astype("uint8")
    found = pack(codes), scale, pack(of_signs)
    return model_plain(x, w1, b1, w2, *rest), found, row_mean(jnp.abs(w2))


WEIGHTS = [normal(*shape) for shape in 3 * [(4, 4), (4,)]]
entry("nn.quantize_model", model, normal(4), *WEIGHTS, plain=model_plain, **CHEAP)
entry("nn.to_integers", stored, normal(4), *WEIGHTS, plain=stored_plain, **VALUE)
BATCH = normal(7, 4)


def calibrated(x):
    """Scales that are fitted to the inputs of each layer."""
    with jax.ensure_compile_time_eval():
        weights = [jnp.asarray(w, x.dtype) for w in WEIGHTS]
        of = lambda axis: (None, nn.FakeQuantize(5, learn_scale=True, channel_axis=axis))
        rules = {"layers[0]": of(0), "layers[3]": of(-1), eqx.nn.Linear: of(None)}
        batch = jnp.asarray(BATCH, x.dtype)
        quantized, _ = nn.quantize_model(network(weights, x.dtype), rules, calibrate=batch)
    layers = quantized.layers
    return quantized(x), [layers[i].input_quantizer.scale for i in (0, 2, 3)]


def calibrated_plain(x):
    w1, b1, w2, b2, w3, b3 = (jnp.asarray(w, x.dtype) for w in WEIGHTS)
    xs, scales = jnp.asarray(BATCH, x.dtype), []
    for w, b, fn in ((w1, b1, jnp.tanh), (w2, b2, lambda x: x), (w3, b3, lambda x: x)):
        scales.append(absmax(xs, 15) if len(scales) == 1 else absmax(xs, 15, 0)[0])
        x = fn(w @ fake_quantize(x, scales[-1], -16, 15) + b)
        xs = fn(xs @ w.T + b[None])
    return x, scales


entry("nn.quantize_model: calibrated", calibrated, normal(4), plain=calibrated_plain, **CHEAP)
