"""Straight-through estimators: values by NumPy's formulas, and the functions whose derivatives
the papers take."""

import itertools

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry, Nasty


ste = eqg.ste
A = np.array
INF, NAN = np.inf, np.nan
N = np.int32(3)  # a leaf that is left alone
X = A([0.52, -1.23, 0.31, 2.4, -0.07])
M = A([[0.52, -1.23, 0.31], [2.4, -0.07, 0.9]])
SHORT = ("value", "jvp", "vjp", "FR")
const = jax.lax.stop_gradient


def identity(x, *_):
    return x


def option(name, fn, *args, orders=SHORT, **options):
    """An op that has a full entry, or whose rule is one of a few that all share."""
    entry(name, fn, *args, orders=orders, transforms=False, **options)


# ---------------------------------------------------------------- rounding, signs and steps

HALVES = A([0.5, 1.5, 2.5, -0.5, -1.5, 1e300, NAN, INF, -INF])
ROUNDED = {
    "round": A([0, 2, 2, -0.0, -2, 1e300, NAN, INF, -INF]),
    "floor": A([0, 1, 2, -1, -2, 1e300, NAN, INF, -INF]),
    "ceil": A([1, 2, 3, -0.0, -1, 1e300, NAN, INF, -INF]),
    "trunc": A([0, 1, 2, -0.0, -1, 1e300, NAN, INF, -INF]),
}
for _name, _value in ROUNDED.items():
    (entry if _name == "round" else option)(
        f"ste.{_name}",
        lambda x, name=_name: getattr(ste, name)({"x": x, "n": N, "m": (2 * x,)}),
        X,
        plain=lambda x, name=_name: {
            "m": (getattr(jnp, name)(2 * x),),
            "n": N,
            "x": getattr(jnp, name)(x),
        },
        smooth=lambda x: {"m": (2 * x,), "n": N, "x": x},
        nasty=[Nasty(HALVES[:6], cts=[np.full(6, 3.0)])],
    )
    option(
        f"ste.{_name}: at halves",
        getattr(ste, _name),
        X,
        plain=getattr(jnp, _name),
        smooth=identity,
        orders=("value",),
        nasty=[Nasty(HALVES, value=_value)],
    )


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


BACKWARDS = {
    "identity": identity,
    "hard_tanh": hard_tanh,
    "approx_sign": approx_sign,
    "swish_sign": swish_sign,
}
POINTS = A([0.0, 1.0, -1.0, 1.5, -INF, INF])
SLOPES = {
    "identity": np.ones(6),
    "hard_tanh": A([1, 1, 1, 0, 0, 0.0]),
    "approx_sign": A([2, 0, 0, 0, 0, 0.0]),
    # 5 (2 - 5 x tanh(5 x / 2)) / (1 + cosh(5 x)) by mpmath, to 20 digits.
    "swish_sign": A([5, *[-0.19499225490032505] * 2, -0.030340209701809028, 0, 0]),
}


class Scaled(eqx.Module):
    factor: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.factor * x)


entry(
    "ste.wrap",
    lambda x, a: (
        ste.wrap(lambda x, n, *, shift: jnp.round(x * n) + shift)(x, 3.0, shift=0.25),
        ste.wrap(backward=Scaled(a))(jnp.sign)(x),
    ),
    X,
    A(0.8),
    plain=lambda x, a: (jnp.round(3 * x) + 0.25, jnp.sign(x)),
    smooth=lambda x, a: (x, jnp.tanh(a * x)),
)
option(
    "ste.wrap: each backward by name",
    lambda x: [ste.wrap(jnp.sign, backward=b)(x) for b in BACKWARDS],
    X,
    plain=lambda x: [jnp.sign(x)] * 4,
    smooth=lambda x: [smooth(x) for smooth in BACKWARDS.values()],
)
for _name in BACKWARDS:
    option(
        f"ste.wrap: {_name}, at its kinks",
        ste.wrap(jnp.sign, backward=_name),
        X,
        plain=jnp.sign,
        smooth=BACKWARDS[_name],
        orders=("value", "vjp"),
        nasty=[Nasty(POINTS, value=[np.sign(POINTS)], cts=[SLOPES[_name]])],
    )


def step_at(zero):
    return lambda x: jnp.where(
        x == 0, zero, jnp.where(jnp.isnan(x), x, (x > 0).astype(x.dtype))
    )


STEPS = {
    # The function, its value at zero and its default.
    "sign": (jnp.sign, 0, hard_tanh),
    "binary_sign": (lambda x: 2 * step_at(1)(x) - 1, 1, hard_tanh),
    "heaviside": (step_at(1), 1, identity),
    "ternary": (lambda x: jnp.where(jnp.abs(x) <= 0.05, 0, jnp.sign(x)), 0, hard_tanh),
}
for _name, (_value, _at_zero, _smooth) in STEPS.items():
    option(
        f"ste.{_name}",
        lambda x, op=getattr(ste, _name): (op(x), op([x, N], backward="swish_sign")),
        A([0.52, -1.23, 0.31, 0.04, -0.06]),
        plain=lambda x, value=_value: (value(x), [value(x), N]),
        smooth=lambda x, smooth=_smooth: (smooth(x), [swish_sign(x), N]),
    )
    option(
        f"ste.{_name}: at zero, at the ends, infinite and NaN",
        getattr(ste, _name),
        X,
        plain=_value,
        smooth=_smooth,
        orders=("value", "vjp"),
        nasty=[
            Nasty(
                A([0.0, 0.05, -0.05, -1.0, INF]),
                value=[A([_at_zero, *A([0, 0] if _name == "ternary" else _pair), _low, 1.0])],
                cts=[A([1.0, 1, 1, 1, _smooth is identity])],
            )
            for _pair, _low in [([1, 0], 0) if _name == "heaviside" else ([1, -1], -1)]
        ],
    )
    option(
        f"ste.{_name}: of NaN",
        getattr(ste, _name),
        X,
        plain=_value,
        smooth=_smooth,
        orders=("value",),
        nasty=[Nasty(A([NAN, 0.7]), value=[A([NAN, 1.0])])],
    )
option(
    "ste.heaviside: at zero",
    lambda x: ste.heaviside(x, at_zero=A([[0.3, 0.6, 0.2]]).astype(x.dtype)),
    M,
    plain=lambda x: (x > 0).astype(x.dtype),
    smooth=identity,
    orders=("value", "vjp"),
    nasty=[Nasty(M * A([1, 0, 1]), value=[A([[1, 0.6, 1], [1, 0.6, 1]])])],
)
option(
    "ste.ternary: of the mean, or an array",
    lambda x: (
        ste.ternary(x, threshold="mean"),
        ste.ternary(x, threshold=A([[0.6, 0.08, 0.3]]).astype(x.dtype)),
    ),
    # 0.7 times the mean of |x| is 0.4375, and the numbers next to it are zero and one.
    A([[0.43, -1.2, 0.44], [1.0, -0.07, 0.61]]),
    plain=lambda x: (
        A([[0, -1, 1], [1, 0, 1]]).astype(x.dtype),
        A([[0, -1, 1], [1, 0, 1]]).astype(x.dtype),
    ),
    smooth=lambda x: (hard_tanh(x), hard_tanh(x)),
    orders=("value", "vjp"),
)


def clip_smooth(x, low, high):
    below, above = const(x) < low, jnp.maximum(const(x), low) > high
    shift = jnp.where(above, high - const(high), jnp.where(below, low - const(low), 0))
    return x + shift


option(
    "ste.clip",
    lambda x, low, high: (ste.clip(x, low, high), ste.clip(2 * x, low), ste.clip(x, max=high)),
    M,
    A([[-0.9, -0.4, 0.35]]),
    A([[1.7, 0.6, 0.8]]),
    plain=lambda x, low, high: (
        jnp.minimum(jnp.maximum(x, low), high),
        jnp.maximum(2 * x, low),
        jnp.minimum(x, high),
    ),
    smooth=lambda x, low, high: (
        clip_smooth(x, low, high),
        clip_smooth(2 * x, low, jnp.inf),
        clip_smooth(x, -jnp.inf, high),
    ),
    costs=False,
)
option(
    "ste.clip: at its bounds, and with bounds in the wrong order",
    lambda x, low, high: ste.clip(x, low, high),
    A([0.3, 0.7]),
    A([0.1, 0.9]),
    A([0.5, 0.4]),
    plain=lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high),
    smooth=clip_smooth,
    orders=("value", "jvp", "vjp"),
    nasty=[
        Nasty(
            A([0.1, 0.5, NAN, INF]),
            np.full(4, 0.1),
            np.full(4, 0.5),
            value=[A([0.1, 0.5, NAN, 0.5])],
            cts=[np.ones(4), np.zeros(4), A([0.0, 0, 0, 1])],
        )
    ],
)

# ---------------------------------------------------------------- choices


def one_hot(x, axis):
    """Of the first of the largest."""
    first = jnp.cumsum(jnp.cumsum((x == jnp.max(x, axis, keepdims=True)), axis), axis) == 1
    return first.astype(x.dtype)


def softmax(x, axis):
    e = jnp.exp(x - const(jnp.max(x, axis, keepdims=True)))
    return e / jnp.sum(e, axis, keepdims=True)


option(
    "ste.one_hot_argmax",
    lambda x, tau: (ste.one_hot_argmax(x), ste.one_hot_argmax(x, axis=0, temperature=tau)),
    M,
    A(0.6),
    plain=lambda x, tau: (one_hot(x, -1), one_hot(x, 0)),
    smooth=lambda x, tau: (softmax(x, -1), softmax(x / tau, 0)),
)
option(
    "ste.one_hot_argmax: ties, infinities and NaN",
    ste.one_hot_argmax,
    M,
    plain=lambda x: one_hot(x, -1),
    smooth=lambda x: softmax(x, -1),
    orders=("value",),
    nasty=[
        Nasty(
            A([[2.0, 5, 5], [-INF, -INF, 1], [NAN, 1, 2]]),
            value=[A([[0, 1, 0], [0, 0, 1], [NAN, NAN, NAN]])],
        )
    ],
)


def soft_top_k(x, k, axis):
    """Sigmoids whose sum is `k`. The threshold by Newton's method, of whose steps the last two
    are differentiated: the error of a derivative is squared by each."""
    total = lambda t: jnp.sum(jax.nn.sigmoid(x - t), axis, keepdims=True) - k

    def newton(t, _):
        y = jax.nn.sigmoid(x - t)
        return t + total(t) / jnp.sum(y * (1 - y), axis, keepdims=True), None

    start = jnp.mean(x, axis, keepdims=True)
    t = const(jax.lax.scan(newton, start, None, length=25)[0])
    return jax.nn.sigmoid(x - newton(newton(t, None)[0], None)[0])


def ranks(x, axis):
    """How many are larger, or equal and before."""
    x = jnp.moveaxis(x, axis, -1)
    other, own = x[..., None, :], x[..., :, None]
    n = np.arange(x.shape[-1])
    before = (other > own) | ((other == own) & (n[None] < n[:, None])[(None,) * (x.ndim - 1)])
    return jnp.moveaxis(jnp.sum(before, -1), -1, axis)


T = A([[0.52, -1.23, 0.31, 1.1, 0.4], [0.9, -0.07, 1.4, -0.5, 0.2], [0.3, 0.6, -0.8, 1.7, 2.0]])
entry(
    "ste.top_k",
    lambda x, tau: (ste.top_k(x, 2), ste.top_k(x, 1, axis=0, temperature=tau)),
    T,
    A(0.7),
    plain=lambda x, tau: (
        (ranks(x, -1) < 2).astype(x.dtype),
        (ranks(x, 0) < 1).astype(x.dtype),
    ),
    smooth=lambda x, tau: (soft_top_k(x, 2, -1), soft_top_k(x / tau, 1, 0)),
    orders=SHORT,
    transforms=False,
)
option(
    "ste.top_k: ties, infinities, NaN, and all",
    lambda x: (ste.top_k(x, 2), ste.top_k(x, 3)),
    A([[1.0, 3, 2]]),
    plain=lambda x: ((ranks(x, -1) < 2).astype(x.dtype), jnp.ones_like(x)),
    smooth=lambda x: (soft_top_k(x, 2, -1), const(x)),
    orders=("value", "vjp"),
    nasty=[
        Nasty(
            A([[5.0, 2, 5], [2, 2, 2]]),
            value=[A([[1.0, 0, 1], [1, 1, 0]]), np.ones((2, 3))],
            cts=[np.zeros((2, 3))],
        )
    ],
)


# ---------------------------------------------------------------- samples

KEY = 3


def gumbel(x):
    """Minus the logarithm of an exponential variable."""
    return x + jr.gumbel(jr.key(KEY), x.shape, x.dtype)


def logistic(x):
    return x + jr.logistic(jr.key(KEY), x.shape, x.dtype)


entry(
    "ste.gumbel_softmax",
    lambda x, tau: (
        ste.gumbel_softmax(x, key=jr.key(KEY), temperature=tau),
        ste.gumbel_softmax(x, key=jr.key(KEY), temperature=tau, hard=True, axis=0),
        ste.gumbel_softmax(x, key=jr.key(KEY)),
    ),
    M,
    A(0.7),
    plain=lambda x, tau: (
        softmax(gumbel(x) / tau, -1),
        one_hot(gumbel(x), 0),
        softmax(gumbel(x), -1),
    ),
    smooth=lambda x, tau: (
        softmax(gumbel(x) / tau, -1),
        softmax(gumbel(x) / tau, 0),
        softmax(gumbel(x), -1),
    ),
    orders=SHORT,
    transforms=False,
    nasty=[Nasty(A([[0.3, -INF, 0.2], [-INF, 0.4, 0.1]]), A(0.7))],
)
option(
    "ste.gumbel_sigmoid",
    lambda x, tau: (
        ste.gumbel_sigmoid(x, key=jr.key(KEY), temperature=tau),
        ste.gumbel_sigmoid(x, key=jr.key(KEY), hard=True),
    ),
    M,
    A(0.7),
    plain=lambda x, tau: (
        1 / (1 + jnp.exp(-logistic(x) / tau)),
        (logistic(x) > 0).astype(x.dtype),
    ),
    smooth=lambda x, tau: (1 / (1 + jnp.exp(-logistic(x) / tau)), jax.nn.sigmoid(logistic(x))),
)
option(
    "ste.bernoulli",
    lambda p: ste.bernoulli(p, key=jr.key(KEY)),
    P := A([[0.2, 0.5, 0.9, 0.6], [0.1, 0.45, 0.7, 0.8]]),
    plain=lambda p: (jr.uniform(jr.key(KEY), p.shape, p.dtype) < p).astype(p.dtype),
    smooth=identity,
    nasty=[Nasty(A([[0.0, 1.0, NAN]]), value=[A([[0, 1, NAN]])], cts=[np.ones((1, 3))])],
)


def reinmax_smooth(tau, x, axis):
    """Liu et al. (2023), algorithm 2."""
    p = softmax(x, axis)
    middle = (one_hot(gumbel(x), axis) + softmax(x / tau, axis)) / 2
    return 2 * softmax(const(jnp.log(middle) - x) + x, axis) - p / 2


option(
    "ste.reinmax",
    lambda x: (
        ste.reinmax(x, key=jr.key(KEY)),
        ste.reinmax(x, key=jr.key(KEY), temperature=1.4, axis=0),
    ),
    M,
    plain=lambda x: (one_hot(gumbel(x), -1), one_hot(gumbel(x), 0)),
    smooth=lambda x: (reinmax_smooth(1, x, -1), reinmax_smooth(1.4, x, 0)),
)
option(
    "ste.reinmax: what is never sampled",
    lambda x: ste.reinmax(x, key=jr.key(KEY)),
    M,
    plain=lambda x: one_hot(gumbel(x), -1),
    smooth=lambda x: reinmax_smooth(1, x, -1),
    orders=("value", "vjp"),
    nasty=[Nasty(A([[0.3, 0.2, -INF]]), value=[A([[1, 0, 0]])], cts=[np.zeros((1, 3))])],
)


# ---------------------------------------------------------------- uniform quantizers


def straight_round(x):
    return x + const(jnp.round(x) - x)


def between(low, high, q):
    """The bounds are inside."""
    return jnp.where(q < low, low, jnp.where(q > high, high, q))


def fake_quantize(x, scale, zero, low, high):
    zero = straight_round(zero)
    return scale * (between(low, high, straight_round(x / scale) + zero) - zero)


# Each has numbers inside, at the ends and outside of the range.
W = A([[0.52, -1.23, 1.6, 40.0], [-2.53, 2.17, -0.31, -50.0], [0.11, 0.77, 3.3, -1.9]])
SCALES = A([[0.31], [0.5], [0.27]])
for _name, _options, _range, _zero in (
    ("ste.fake_quantize", {"bits": 4}, (-8, 7), 1.6),
    ("ste.fake_quantize: narrow", {"bits": 3, "narrow": True}, (-3, 3), -1.2),
    ("ste.fake_quantize: unsigned", {"bits": 3, "signed": False}, (0, 7), 2.8),
    ("ste.fake_quantize: unsigned, narrow", {"signed": False, "narrow": True}, (1, 255), 3.2),
):
    (entry if _range == (-8, 7) else option)(
        _name,
        lambda x, s, z, options=_options: ste.fake_quantize(x, s, z, **options),
        W * (90 if _range[1] == 255 else 1),
        SCALES,
        A(_zero),
        plain=lambda x, s, z, r=_range: fake_quantize(x, s, z, *r),
        smooth=lambda x, s, z, r=_range: fake_quantize(x, s, z, *r),
        costs=False,
    )
option(
    "ste.fake_quantize: eight bits",
    lambda x, s: ste.fake_quantize(x, s),
    W * 100,
    A(2.1),
    plain=lambda x, s: s * between(-128, 127, jnp.round(x / s)),
    smooth=lambda x, s: s * between(-128, 127, straight_round(x / s)),
    orders=("value", "vjp"),
    nasty=[
        Nasty(
            A([INF, -INF, 3.0]), A(2.0), value=[A([254, -256, 4.0])], cts=[A([0, 0, 1]), -0.5]
        )
    ],
    # Of 1,500 numbers, whose cotangent of the scale is a sum.
    half=(np.linspace(-3, 3, 1500), A(0.25)),
)


def lsq(x, step, g, low, high):
    """Esser et al. (2020), appendix A: the gradient of the step is scaled."""
    step = const(step - step * g) + step * g
    u = x / step
    clipped = jnp.where(u <= low, low, jnp.where(u >= high, high, u))
    return straight_round(clipped) * step


for _name, _options, _range in (
    ("ste.lsq", {"bits": 4}, (-8, 7)),
    ("ste.lsq: unsigned", {"bits": 3, "signed": False}, (0, 7)),
    ("ste.lsq: eight bits, and a scale", {"gradient_scale": 0.3}, (-128, 127)),
):
    for _step in (SCALES, A(0.4)):
        _g = _options.get("gradient_scale", 1 / np.sqrt(12 / _step.size * _range[1]))
        option(
            _name if _step is SCALES else f"{_name}: one step",
            lambda x, s, options=_options: ste.lsq(x, s, **options),
            W,
            _step,
            plain=lambda x, s, r=_range, g=_g: lsq(x, s, g, *r),
            smooth=lambda x, s, r=_range, g=_g: lsq(x, s, g, *r),
            orders=("value", "jvp", "vjp"),
            costs=False,
        )
option(
    "ste.lsq: at the ends of the range",
    lambda x, s: ste.lsq(x, s, bits=2, gradient_scale=1.0),
    X,
    A(0.5),
    plain=lambda x, s: lsq(x, s, 1, -2, 1),
    smooth=lambda x, s: lsq(x, s, 1, -2, 1),
    orders=("value", "vjp"),
    # Both ends count as clipped.
    nasty=[
        Nasty(
            A([0.5, -1.0, 0.2, INF]),
            A(0.5),
            value=[A([0.5, -1, 0, 0.5])],
            cts=[A([0, 0, 1, 0]), 1 - 2 - 0.4 + 1],
        )
    ],
)
option(
    "ste.absmax_scale",
    lambda x: (
        ste.absmax_scale(x),
        ste.absmax_scale(x, bits=4, axis=1),
        ste.absmax_scale(x, bits=3, signed=False, axis=(0, 1)),
    ),
    W,
    plain=lambda x: (
        const(jnp.max(jnp.abs(x)) / 127),
        const(jnp.max(jnp.abs(x), 1, keepdims=True) / 7),
        const(jnp.max(jnp.abs(x), keepdims=True) / 7),
    ),
    orders=("value", "jvp", "vjp"),
    half=(W,),
    nasty=[
        Nasty(
            np.zeros((1, 2)),
            value=[np.full(s, 2.2250738585072014e-308) for s in [(), (1, 1), (1, 1)]],
            cts=[np.zeros((1, 2))],
        )
    ],
)


def dorefa(bits, straight, x):
    levels = 2**bits - 1
    tanh = jnp.tanh(x)
    unit = tanh / (2 * const(jnp.max(jnp.abs(tanh)))) + 0.5
    return 2 * straight(unit * levels) / levels - 1


def dorefa_activations(bits, straight, x):
    levels = 2**bits - 1
    return straight(between(0, 1, x) * levels) / levels


option(
    "ste.dorefa",
    lambda x: (
        ste.dorefa(x),
        ste.dorefa(x, bits=3),
        ste.dorefa(x, bits=1, mode="activations"),
        ste.dorefa(x, mode="activations"),
    ),
    X,
    plain=lambda x: (
        dorefa(2, jnp.round, x),
        dorefa(3, jnp.round, x),
        dorefa_activations(1, jnp.round, x),
        dorefa_activations(2, jnp.round, x),
    ),
    smooth=lambda x: (
        dorefa(2, identity, x),
        dorefa(3, identity, x),
        dorefa_activations(1, identity, x),
        dorefa_activations(2, identity, x),
    ),
)
option(
    "ste.dorefa: zeros, and activations at the ends",
    lambda x: ste.dorefa(x, mode="activations"),
    X,
    plain=lambda x: dorefa_activations(2, jnp.round, x),
    smooth=lambda x: dorefa_activations(2, identity, x),
    orders=("value", "vjp"),
    nasty=[Nasty(A([0.0, 1.0, INF, -2]), value=[A([0, 1, 1, 0.0])], cts=[A([1.0, 1, 0, 0])])],
)


def pact(x, alpha):
    return jnp.where(x >= alpha, alpha, jnp.where(x >= 0, x, 0))


option(
    "ste.pact",
    lambda x, alpha: (ste.pact(x, alpha), ste.pact(x, alpha, bits=2)),
    M,
    A([[1.5, 0.8, 0.7]]),
    plain=lambda x, alpha: tuple(
        jnp.round(pact(x, alpha) / alpha * n) * alpha / n for n in (255, 3)
    ),
    smooth=lambda x, alpha: (pact(x, alpha),) * 2,
    costs=False,
    nasty=[
        Nasty(A([[0.0, 1.5, 3.0]]), A([[1.0, 1.5, 2.0]]), cts=[A([[2, 0, 0]]), A([[0, 2, 2]])])
    ],
)

# ---------------------------------------------------------------- codebooks

LEVELS = (5, 4, 3)


def fsq_bounded(z):
    """Mentzer et al. (2024), appendix A.1; the four levels are shifted by a half."""
    h = A([4, 3, 2]) * (1 - 1e-3) / 2
    o = A([0, 0.5, 0])
    cast = lambda a: a.astype(z.dtype)[None]
    return jnp.tanh(z + cast(np.tan(o / h))) * cast(h) - cast(o)


def fsq_plain(z):
    digits = jnp.round(fsq_bounded(z)) + A([2, 2, 1]).astype(z.dtype)[None]
    codes = digits / A([2, 2, 1]).astype(z.dtype)[None] - 1
    index = digits[:, 0] + 5 * digits[:, 1] + 20 * digits[:, 2]
    return codes, index.astype("int32")


Z = A([[0.3, -2.0, 0.1], [1.1, 0.24, -0.9], [-0.4, 1.6, 2.0], [-3.0, -0.01, 0.4]])
option(
    "ste.fsq",
    lambda z: ste.fsq(z, LEVELS),
    Z,
    plain=fsq_plain,
    smooth=lambda z: (fsq_bounded(z) / A([2, 2, 1]).astype(z.dtype)[None], fsq_plain(z)[1]),
)
option(
    "ste.fsq_codebook",
    lambda x: ste.fsq_codebook(LEVELS, x.dtype) @ x,
    A([0.4, -1.3, 2.1]),
    plain=lambda x: (
        A(
            [
                [a / 2 - 1, b / 2 - 1, c - 1]
                for c, b, a in itertools.product(*map(range, (3, 4, 5)))
            ]
        ).astype(x.dtype)
        @ x
    ),
    orders=("value",),
)
CODEBOOK = A([[0.1, 0.0, -0.4], [1.0, 1.2, 0.3], [0.0, 2.0, -1.1], [0.3, -1.9, 0.2]])


def nearest(z, codebook):
    distances = jnp.sum((z[:, None] - codebook[None]) ** 2, -1)
    index = jnp.argmin(distances, 1)
    return codebook[index], index


option(
    "ste.vector_quantize",
    ste.vector_quantize,
    Z,
    CODEBOOK,
    plain=nearest,
    smooth=lambda z, codebook: (z, nearest(z, codebook)[1]),
    nasty=[
        # Entries that are close together and far from zero.
        Nasty(1e9 + Z / 8, 1e9 + CODEBOOK / 8, cts=[np.ones((4, 3)), np.zeros((4, 3))]),
    ],
)
option(
    "ste.vector_quantize: ties and NaN",
    lambda z, codebook: ste.vector_quantize(z, codebook)[0],
    Z,
    CODEBOOK,
    plain=lambda z, codebook: nearest(z, codebook)[0],
    smooth=identity,
    orders=("value",),
    nasty=[
        Nasty(A([[0.0, 1], [NAN, 0]]), A([[0.0, 2], [0, 0]]), value=[A([[0, 2], [NAN, NAN]])]),
        Nasty(A([[0.0, 1]]), A([[0.0, 2], [NAN, 0]]), value=[A([[NAN, NAN]])]),
    ],
)
