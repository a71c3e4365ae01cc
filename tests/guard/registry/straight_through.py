"""Straight-through estimators: values by NumPy's formulas, and the functions whose derivatives
the papers take."""

import itertools

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry, Nasty


# A line has as many arguments as there is room for.
# fmt: off
ste, A, const = eqg.ste, np.array, jax.lax.stop_gradient
INF, NAN = np.inf, np.nan
N = np.int32(3)  # a leaf that is left alone
X = A([0.52, -1.23, 0.31, 2.4, -0.07])
M = A([[0.52, -1.23, 0.31], [2.4, -0.07, 0.9]])
VJP, SHORT = ("value", "vjp"), ("value", "jvp", "vjp", "FR")


def op(name, fn, value, smooth, *args, edges=(), orders=SHORT, transforms=False, **options):
    """Each of the `edges` is the arguments, and value and cotangents by hand."""
    arrays = lambda xs: None if xs is None else list(map(A, xs))
    nasty = [
        Nasty(*(A(x, float) for x in point), value=arrays(value), cts=arrays(cts))
        for point, value, cts in edges
    ]
    options |= {"orders": orders, "transforms": transforms, "costs": False, "nasty": nasty}
    entry(f"ste.{name}", fn, *args, plain=value, smooth=smooth, **options)


identity = lambda x, *_: x


def hard_tanh(x):
    """One is inside."""
    return jnp.where(jnp.abs(x) <= 1, x, const(jnp.sign(x)))


def approx_sign(x):
    """Liu et al. (2018), Bi-Real Net, equation 4."""
    return jnp.where(x < 0, 2 * x + x**2, 2 * x - x**2) * const((abs(x) < 1).astype(x.dtype))


def swish_sign(x):
    """Darabi et al. (2018), BNN+, with beta = 5."""
    s = jax.nn.sigmoid(5 * x)
    return 2 * s * (1 + 5 * x * (1 - s)) - 1


# ---------------------------------------------------------------- rounding, signs and steps

HALVES = [0.5, 1.5, 2.5, -0.5, -1.5, 1e300, NAN, INF, -INF]
for _name, _value in {
    "round": [0, 2, 2, 0, -2, 1e300, NAN, INF, -INF],
    "floor": [0, 1, 2, -1, -2, 1e300, NAN, INF, -INF],
    "ceil": [1, 2, 3, 0, -1, 1e300, NAN, INF, -INF],
    "trunc": [0, 1, 2, 0, -1, 1e300, NAN, INF, -INF],
}.items():
    edges = [([HALVES], [_value], [np.ones(9)])]
    op(_name, getattr(ste, _name), getattr(jnp, _name), identity, X, edges=edges)


POINTS = [0.0, 1.0, -1.0, 1.5, -INF, INF]
for _smooth, _slopes in {
    hard_tanh: [1, 1, 1, 0, 0, 0],
    approx_sign: [2, 0, 0, 0, 0, 0],
    # 5 (2 - 5 x tanh(5 x / 2)) / (1 + cosh(5 x)), by mpmath
    swish_sign: [5, *[-0.19499225490032505] * 2, -0.030340209701809028, 0, 0],
}.items():
    fn = eqg.with_gradient_of(jnp.sign, getattr(ste, _smooth.__name__))
    edges = [([POINTS], [np.sign(POINTS)], [_slopes])]
    op(f"{_smooth.__name__}: of a sign", fn, jnp.sign, _smooth, X, edges=edges)
    value = lambda x, f=_smooth: jnp.where(abs(x) < 1, f(x), jnp.sign(x))
    value = _smooth if _smooth is swish_sign else value
    op(_smooth.__name__, getattr(ste, _smooth.__name__), value, _smooth, X)


step = lambda x: jnp.where(jnp.isnan(x), x, (x >= 0).astype(x.dtype))
STEPS = {
    "sign": (jnp.sign, hard_tanh, [0, 1, -1]),
    "binary_sign": (lambda x: 2 * step(x) - 1, hard_tanh, [1, 1, -1]),
    "heaviside": (step, identity, [1, 1, 0]),
    "ternary": (lambda x: jnp.where(abs(x) <= 0.05, 0, jnp.sign(x)), hard_tanh, [0, 0, 0]),
}
for _name, (_value, _smooth, _at) in STEPS.items():
    _op = getattr(ste, _name)
    op(
        _name,
        lambda x, op=_op: (op(x), op([x, N])),
        lambda x, value=_value: (value(x), [value(x), N]),
        lambda x, smooth=_smooth: (smooth(x), [smooth(x), N]),
        X * A([1, 1, 1, 0.016, 0.9]),  # also next to 0.05
    )
    slopes = np.ones(6) if _smooth is identity else [1, 1, 1, 1, 0, 0]
    edges = [([[0, 0.05, -0.05, 1, INF, NAN]], [[*_at, 1, 1, NAN]], [slopes])]
    op(f"{_name}: edges", _op, _value, _smooth, X, orders=VJP, edges=edges)
op("heaviside: at zero",
    lambda x: ste.heaviside(x, at_zero=A([[0.3, 0.6, 0.2]]).astype(x.dtype)),
    *(step, identity, M), orders=VJP,
    edges=[([M * A([1, 0, 1])], [[[1, 0.6, 1], [1, 0.6, 1]]], None)])
# 0.7 times the mean of |x| is 0.4375, and the numbers next to it are zero and one.
NEAR = A([[0, -1, 1], [1, 0, 1]])
for _threshold in ("mean", A([[0.6, 0.08, 0.3]])):
    cast = lambda x, t=_threshold: t if isinstance(t, str) else t.astype(x.dtype)
    op(f"ternary: threshold {_threshold}",
        lambda x, cast=cast: ste.ternary(x, threshold=cast(x)),
        *(lambda x: NEAR.astype(x.dtype), hard_tanh, A([[0.43, -1.2, 0.44], [1, -0.07, 0.61]])),
        orders=VJP)


clip = lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high)


def clip_smooth(x, low, high):
    below, above = const(x) < low, jnp.maximum(const(x), low) > high
    shift = jnp.where(above, high - const(high), jnp.where(below, low - const(low), 0))
    return x + shift


CLIPS = (
    lambda x, a, b: (ste.clip(x, a, b), ste.clip(x, a), ste.clip(x, max=b)),
    lambda x, a, b: (clip(x, a, b), jnp.maximum(x, a), jnp.minimum(x, b)),
    lambda x, a, b: (clip_smooth(x, a, b), clip_smooth(x, a, INF), clip_smooth(x, -INF, b)),
)
op("clip", *CLIPS, *(M, A([[-0.9, -0.4, 0.35]]), A([[1.7, 0.6, 0.8]])))
AT_BOUNDS = [[0.1, 0.5, NAN, INF], np.full(4, 0.1), np.full(4, 0.5)]
CLIPPED = [[0.1, 0.5, NAN, 0.5], [0.1, 0.5, NAN, INF], [0.1, 0.5, NAN, 0.5]]
op("clip: at its bounds, and with bounds in the wrong order",
    *CLIPS, *(A([0.3, 0.2]), A([0.1, 0.9]), A([0.5, 0.4])),
    edges=[(AT_BOUNDS, CLIPPED, [np.full(4, 3.0), np.zeros(4), [0, 0, 0, 2.0]])])

# ---------------------------------------------------------------- choices


def one_hot(x, axis):
    """One at the first of the largest elements; NaN beside a NaN."""
    largest = jnp.max(x, axis, keepdims=True)
    first = jnp.cumsum(jnp.cumsum((x == largest), axis), axis) == 1
    return jnp.where(jnp.isnan(largest), largest, first.astype(x.dtype))


def softmax(x, axis):
    e = jnp.exp(x - const(jnp.max(x, axis, keepdims=True)))
    return e / jnp.sum(e, axis, keepdims=True)


op("one_hot_argmax",
    lambda x, tau: (ste.one_hot_argmax(x), ste.one_hot_argmax(x, axis=0, temperature=tau)),
    lambda x, tau: (one_hot(x, -1), one_hot(x, 0)),
    lambda x, tau: (softmax(x, -1), softmax(x / tau, 0)), *(M, A(0.6)))
TIES, AT_TIES = [[2, 5, 5], [-INF, -INF, 1], [NAN, 1, 2]], [[0, 1, 0], [0, 0, 1], [NAN] * 3]
op("one_hot_argmax: ties, infinities and NaN",
    lambda x: ste.one_hot_argmax(x, axis=0, temperature=0.6),
    *(lambda x: one_hot(x, 0), lambda x: softmax(x / 0.6, 0), M), orders=VJP,
    edges=[([A(TIES).T], [A(AT_TIES).T], None)])


def soft_top_k(x, k, axis):
    """Sigmoids whose sum is `k`. The threshold by Newton's method, of whose steps the last two
    are differentiated: the error of a derivative is squared by each."""

    def newton(t, _):
        y = jax.nn.sigmoid(x - t)
        excess = jnp.sum(y, axis, keepdims=True) - k
        return t + excess / jnp.sum(y * (1 - y), axis, keepdims=True), None

    start = jnp.mean(x, axis, keepdims=True)
    t = const(jax.lax.scan(newton, start, None, length=25)[0])
    return jax.nn.sigmoid(x - newton(newton(t, None)[0], None)[0])


def top_k(x, k, axis):
    """One where fewer than `k` elements are larger, or equal and before."""
    x = jnp.moveaxis(x, axis, -1)
    other, own = x[..., None, :], x[..., :, None]
    earlier = np.tril(np.ones((x.shape[-1],) * 2, bool), -1)[(None,) * (x.ndim - 1)]
    ranks = jnp.sum((other > own) | ((other == own) & earlier), -1)
    return jnp.moveaxis((ranks < k).astype(x.dtype), -1, axis)


op("top_k", lambda x, tau: (ste.top_k(x, 2), ste.top_k(x, 1, axis=0, temperature=tau)),
    lambda x, tau: (top_k(x, 2, -1), top_k(x, 1, 0)),
    lambda x, tau: (soft_top_k(x, 2, -1), soft_top_k(x / tau, 1, 0)),
    *(np.concatenate([M, A([[0.3, 0.6, -0.8]])]), A(0.7)))
op("top_k: ties, and all",
    lambda x: (ste.top_k(x, 2, axis=0, temperature=0.7), ste.top_k(x, 3, axis=0)),
    lambda x: (top_k(x, 2, 0), jnp.ones_like(x)),
    lambda x: (soft_top_k(x / 0.7, 2, 0), const(x)), A([[1.0], [3], [2]]), orders=VJP,
    edges=[
        ([[[5], [2], [5]]], [[[1], [0], [1]], np.ones((3, 1))], [np.zeros((3, 1))]),
        ([[[2], [2], [2]]], [[[1], [1], [0]], np.ones((3, 1))], [np.zeros((3, 1))]),
    ])

# ---------------------------------------------------------------- samples


gumbel = lambda x: x + jr.gumbel(jr.key(3), x.shape, x.dtype)
logistic = lambda x: x + jr.logistic(jr.key(3), x.shape, x.dtype)
keyed = lambda fn, *args, **options: fn(*args, key=jr.key(3), **options)
soft = ste.gumbel_softmax
op("gumbel_softmax",
    lambda x, t: (keyed(soft, x), keyed(soft, x, temperature=t, hard=True, axis=0)),
    lambda x, t: (softmax(gumbel(x), -1), one_hot(gumbel(x), 0)),
    lambda x, t: (softmax(gumbel(x), -1), softmax(gumbel(x) / t, 0)), *(M, A(0.7)),
    edges=[([[[0.3, -INF, 0.2], [-INF, 0.4, 0.1]], 0.7], None, None)],
    draws=True)
bit = ste.gumbel_sigmoid
op("gumbel_sigmoid", lambda x, tau: (keyed(bit, x, temperature=tau), keyed(bit, x, hard=True)),
    lambda x, tau: (1 / (1 + jnp.exp(-logistic(x) / tau)), (logistic(x) > 0).astype(x.dtype)),
    lambda x, tau: (jax.nn.sigmoid(logistic(x) / tau), jax.nn.sigmoid(logistic(x))),
    *(M, A(0.7)), draws=True)
op("bernoulli", lambda p: keyed(ste.bernoulli, p),
    lambda p: (jr.uniform(jr.key(3), p.shape, p.dtype) < p).astype(p.dtype), identity,
    A([[0.2, 0.5, 0.9, 0.6], [0.1, 0.45, 0.7, 0.8]]),
    edges=[([[[0, 1, NAN]]], [[[0, 1, NAN]]], [np.ones((1, 3))])], draws=True)


def reinmax(tau, x, axis):
    """Liu et al. (2023), algorithm 2."""
    middle = (one_hot(gumbel(x), axis) + softmax(x / tau, axis)) / 2
    return 2 * softmax(const(jnp.log(middle) - x) + x, axis) - softmax(x, axis) / 2


op("reinmax", lambda x: (keyed(ste.reinmax, x), keyed(ste.reinmax, x, temperature=1.4, axis=0)),
    lambda x: (one_hot(gumbel(x), -1), one_hot(gumbel(x), 0)),
    lambda x: (reinmax(1, x, -1), reinmax(1.4, x, 0)), M, draws=True)
op("reinmax: what is never sampled",
    lambda x: keyed(ste.reinmax, x, temperature=1.4, axis=0),
    *(lambda x: one_hot(gumbel(x), 0), lambda x: reinmax(1.4, x, 0), M), orders=VJP,
    edges=[([[[0.3], [0.2], [-INF]]], [[[1], [0], [0]]], [np.zeros((3, 1))])], draws=True)

# ---------------------------------------------------------------- uniform quantizers


straight = lambda x: x + const(jnp.round(x) - x)


def between(low, high, q):
    """The bounds are inside."""
    return jnp.where(q < low, low, jnp.where(q > high, high, q))


def fake_quantize(low, high, x, scale, zero):
    zero = straight(zero)
    return scale * (between(low, high, straight(x / scale) + zero) - zero)


with_range = lambda fn, *numbers: lambda *args: fn(*numbers, *args)


# Each has numbers inside, at the ends and outside of the range.
W = A([[0.52, -1.23, 1.6, 40.0], [-2.53, 2.17, -0.31, -50.0], [0.11, 0.77, 3.3, -1.9]])
SCALES = A([[0.31], [0.5], [0.27]])
for _options, _range, _zero in (
    ({"bits": 4}, (-8, 7), 1.6), ({"bits": 3, "narrow": True}, (-3, 3), -1.2),
    ({"bits": 3, "signed": False}, (0, 7), 2.8),
    ({"signed": False, "narrow": True}, (1, 255), 3.2),
):
    fn = lambda x, s, z, options=_options: ste.fake_quantize(x, s, zero_point=z, **options)
    plain = with_range(fake_quantize, *_range)
    x = W * (90 if _range[1] == 255 else 1)
    name = f"fake_quantize: {_options}".replace(": {'bits': 4}", "")
    op(name, fn, plain, plain, x, SCALES, A(_zero), transforms=_range == (-8, 7))
eight = lambda x, s: fake_quantize(-128, 127, x, s, 0 * s)
op(
    "fake_quantize: eight bits",
    *(ste.fake_quantize, lambda x, s: s * between(-128, 127, jnp.round(x / s)), eight),
    *(100 * W, A(2.1)),
    orders=VJP,
    edges=[([[INF, -INF, 3.0], 2.0], [[254, -256, 4.0]], [[0, 0, 1], -0.5])],
    # 1,500 numbers, over which the cotangent of the scale is a sum
    half=(np.linspace(-3, 3, 1500), A(0.25)),
)


def lsq(g, low, high, x, step):
    """Esser et al. (2020), appendix A: the gradient of the step is scaled."""
    step = const(step - step * g) + step * g
    u = x / step
    return straight(jnp.where(u <= low, low, jnp.where(u >= high, high, u))) * step


for _options, _range in (
    ({"bits": 4}, (-8, 7)), ({"bits": 3, "signed": False}, (0, 7)),
    ({"gradient_scale": 0.3}, (-128, 127)),
):
    for _step in (SCALES, A(0.4)):
        g = _options.get("gradient_scale", 1 / np.sqrt(12 / _step.size * _range[1]))
        fn = lambda x, s, options=_options: ste.lsq(x, s, **options)
        plain = with_range(lsq, g, *_range)
        name = f"lsq: {_options}, {_step.size} steps".replace(": {'bits': 4}, 1 steps", "")
        op(name, fn, plain, plain, W, _step, orders=("value", "jvp", "vjp"))
two_bits = with_range(lsq, 1, -2, 1)
op("lsq: at the ends of the range, which count as clipped",
    lambda x, s: ste.lsq(x, s, bits=2, gradient_scale=1.0), *(two_bits, two_bits, X, A(0.5)),
    orders=VJP,
    edges=[([[0.5, -1, 0.2, INF], 0.5], [[0.5, -1, 0, 0.5]], [[0, 0, 1, 0], 1 - 2 - 0.4 + 1])])
largest = lambda x: (
    jnp.max(jnp.abs(x)) / 127, jnp.max(jnp.abs(x), 1, keepdims=True) / 7,
    jnp.max(jnp.abs(x), keepdims=True) / 7,
)
op("absmax_scale", lambda x: (
        ste.absmax_scale(x), ste.absmax_scale(x, bits=4, axis=1),
        ste.absmax_scale(x, bits=3, signed=False, axis=(0, 1)),
    ), *(largest, lambda x: const(largest(x)), W), orders=("value", "jvp", "vjp"), half=(W,),
    edges=[
        (
            [np.zeros((1, 2))],
            [np.full(s, 2.2250738585072014e-308) for s in [(), (1, 1), (1, 1)]],
            [np.zeros((1, 2))],
        )
    ])


# ---------------------------------------------------------------- codebooks

LEVELS, HALF_WIDTH = (5, 4, 3), A([[2.0, 2, 1]])


def fsq_bounded(z):
    """Mentzer et al. (2024), appendix A.1; the four levels are shifted by a half."""
    h, o = A([[4, 3, 2]]) * (1 - 1e-3) / 2, A([[0, 0.5, 0]])
    shift, h, o = (a.astype(z.dtype) for a in (np.tan(o / h), h, o))
    return jnp.tanh(z + shift) * h - o


def fsq_plain(z):
    digits = jnp.round(fsq_bounded(z)) + HALF_WIDTH.astype(z.dtype)
    index = digits[:, 0] + 5 * digits[:, 1] + 20 * digits[:, 2]
    return digits / HALF_WIDTH.astype(z.dtype) - 1, index.astype("int32")


def nearest(z, codebook):
    index = jnp.argmin(jnp.sum((z[:, None] - codebook[None]) ** 2, -1), 1)
    return codebook[index], index


Z = A([[0.3, -2.0, 0.1], [1.1, 0.24, -0.9], [-0.4, 1.6, 2.0], [-3.0, -0.01, 0.4]])
C = A([[0.1, 0.0, -0.4], [1.0, 1.2, 0.3], [0.0, 2.0, -1.1], [0.3, -1.9, 0.2]])
soft_codes = lambda z: (fsq_bounded(z) / HALF_WIDTH.astype(z.dtype), fsq_plain(z)[1])
codes = A(
    [[a / 2 - 1, b / 2 - 1, c - 1] for c, b, a in itertools.product(*map(range, (3, 4, 5)))]
)
op("fsq", lambda z: ste.fsq(z, LEVELS), fsq_plain, soft_codes, Z)
op("fsq_codebook", lambda x: ste.fsq_codebook(LEVELS, x.dtype) @ x,
    *(lambda x: codes.astype(x.dtype) @ x, None, A([0.4, -1.3, 2.1])), orders=("value",))
op(
    "vector_quantize",
    *(ste.vector_quantize, nearest, lambda z, c: (z, nearest(z, c)[1]), Z, C),
    # Entries that are close together and far from zero.
    edges=[([1e9 + Z / 8, 1e9 + C / 8], None, [np.ones((4, 3)), np.zeros((4, 3))])],
)
single = lambda c: c.astype("float32")  # a codebook of another precision
op("vector_quantize: ties and NaN", lambda z, c: ste.vector_quantize(z, single(c))[0],
    *(lambda z, c: nearest(z, single(c).astype(z.dtype))[0], identity, Z, C), orders=VJP,
    edges=[
        ([[[0, 1], [NAN, 0]], [[0, 2], [0, 0]]], [[[0, 2], [NAN, NAN]]], None),
        ([[[0, 1]], [[0, 2], [NAN, 0]]], [[[NAN, NAN]]], None),
    ])
