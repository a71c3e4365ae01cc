"""`safe`: norms, sums in the logarithm, probabilities, distances; and decompositions."""

import functools as ft

import eqx_grads as eqg
import jax.numpy as jnp
import numpy as np

from .entry import entry, Nasty, ORDERS


# A line has as many arguments as there is room for.
# fmt: off
safe = eqg.safe
NAN, INF, LOG_2 = np.nan, np.inf, np.log(2)
MASK = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 1, 1], [0, 0, 0, 1, 1]], bool)
rng = np.random.default_rng(1)
OPTION = {"transforms": False, "costs": False, "orders": ("value", "jvp", "vjp", "RR")}
normal = lambda *shape, shift=0.0, scale=1.0: shift + scale * rng.normal(size=shape)
complex_normal = lambda *shape: rng.normal(size=shape) + 1j * rng.normal(size=shape)


def nasty(x, value, ct, second=None):
    """Of one array."""
    array = lambda x: np.asarray(x, float)
    second = None if second is None else [array(second)]
    return Nasty(
        array(x), value=None if value is None else array(value), cts=array(ct), second=second,
        each=True,
    )


def dirty(x, mask=MASK):
    """With garbage where the mask is false."""
    junk = np.array([NAN, INF, -INF])[np.arange(x.size) % 3].reshape(x.shape)
    return (np.where(mask, x, junk),)


# ---------------------------------------------------------------- what they are in the textbook


def norm(x, ord=2, axis=None, keepdims=False):
    size = jnp.abs(x)
    if ord < INF:
        return jnp.sum(size**ord, axis, keepdims=keepdims) ** (1 / ord)
    return jnp.take_along_axis(size, jnp.argmax(size, axis, keepdims=True), axis).squeeze(axis)


def normalize(x, axis=-1):
    return x / norm(x, axis=axis, keepdims=True).astype(x.dtype)


def logsumexp(a, axis=None, b=None, keepdims=False, return_sign=False, where=True):
    terms = jnp.exp(a) if b is None else b * jnp.exp(a)
    total = jnp.sum(terms, axis, keepdims=keepdims, where=where)
    out = jnp.log(jnp.abs(total))
    return (out, jnp.sign(total)) if return_sign else out


def softmax(x, axis=-1, where=True):
    e = jnp.where(where, jnp.exp(x), 0)
    return e / jnp.sum(e, axis, keepdims=True)


def log_softmax(x, axis=-1, where=True):
    p = softmax(x, axis, where)
    return jnp.where(where, jnp.log(jnp.where(where, p, 1)), -INF)


def cumlogsumexp(x, axis=0, reverse=False):
    turned = lambda x: jnp.flip(x, axis) if reverse else x
    return turned(jnp.log(jnp.cumsum(turned(jnp.exp(x)), axis)))


def cosine_similarity(x, y, axis=-1):
    return jnp.sum(x * y, axis) / (norm(x, 2, axis) * norm(y, 2, axis))


def pairwise_distance(x, y=None, ord=2):
    """Without the derivative of a distance to itself."""
    gap = x[..., :, None, :] - (x if y is None else y)[..., None, :, :]
    if y is None:
        same = jnp.eye(x.shape[-2], dtype=bool)
        return jnp.where(same, 0, norm(jnp.where(same[..., None], 1, gap), ord, -1))
    return norm(gap, ord, -1)


PLAIN = {
    "std": jnp.std,
    "entropy": lambda p, axis=-1, where=True: -jnp.sum(p * jnp.log(p), axis, where=where),
    **{f.__name__: f for f in (norm, normalize, logsumexp, softmax, log_softmax)},
    **{f.__name__: f for f in (cumlogsumexp, cosine_similarity, pairwise_distance)},
}


def of(name, call, *args, **options):
    """An entry for a call of the function in `safe`, and of its formula."""
    base = name.split(":")[0]
    fn, plain = ft.partial(call, getattr(safe, base)), ft.partial(call, PLAIN[base])
    entry(f"safe.{name}", fn, *args, plain=plain, **options)


# ---------------------------------------------------------------- norms

call = lambda f, *args: f(*args)
X, Z = normal(3, 5), complex_normal(3, 5)
BLOCK, HALF, ONE_D = normal(2, 3, 5), (normal(2, 1000),), normal(7)
VECTORS = np.array([[3e-200, 4e-200], [0, 0], [3e200, -4e200], [INF, -2], [1e-300, 1e9]])
SLOPES = [[0.6, 0.8], [0, 0], [0.6, -0.8], [1, 0], [1e-309, 1]]
N3 = 91 ** (1 / 3)
THIRDS = np.array([[9, 16], [0, 0], [9, -16], [N3**2, 0]]) / N3**2
NASTY = {
    3: [nasty(VECTORS[:4], [1e-200 * N3, 0, 1e200 * N3, INF], THIRDS)],
    2: [nasty(VECTORS, [5e-200, 0, 5e200, INF, 1e9], SLOPES)],
    1: [nasty([[2, -5, 5, 0]], [12], [[1, -1, 1, 0]], [[0, 0, 0, NAN]])], INF: [
        nasty([[2, -5, 5]], [5], [[0, -0.5, 0.5]], [[0, NAN, NAN]]),
        nasty([[0, 0]], [0], [[0, 0]], [[NAN, NAN]]),
    ],
}
ZEROS = [
    nasty(np.zeros(3), 0, np.zeros(3), np.full(3, NAN)), nasty(np.zeros(0), 0, np.zeros(0)),
]
of("norm", call, ONE_D, nasty=ZEROS, half=(normal(1500),), complex_args=(Z[0],))
for _ord, _nasty in NASTY.items():
    _call = lambda f, x, ord=_ord: f(x, ord, axis=-1)
    of(f"norm: {_ord}", _call, X, nasty=_nasty, half=HALF, complex_args=(Z,), **OPTION)
of("norm: axes", lambda f, x: f(x, axis=(0, 2), keepdims=True), BLOCK, **OPTION)
of("norm: keepdims", lambda f, x: f(x, 1, axis=1, keepdims=True), BLOCK, **OPTION)
_nasty = nasty(
    VECTORS[:4], SLOPES[:4], [
        [0.2 * 0.8 / 5e-200, -0.2 * 0.6 / 5e-200], [0, 0],
        [1.4 * 0.8 / 5e200, 1.4 * 0.6 / 5e200], [0, 0],
    ],
)
of("normalize", call, X, nasty=[_nasty], half=HALF, complex_args=(Z,))
of("normalize: axes", lambda f, x: [f(x, axis=(0, 2)), f(x, axis=None)], BLOCK, **OPTION)
EQUAL = [
    nasty([0.1] * 3, 0, np.zeros(3), np.full(3, NAN)), nasty([7.0], 0, [0], [0]),
    nasty([-1e200, 1e200], 1e200, [-0.5, 0.5]), nasty([3e-200, 1e-200], 1e-200, [0.5, -0.5]),
]
of("std", call, ONE_D, nasty=EQUAL, half=(normal(1500, shift=3.0),))
_call = lambda f, x: f(x, -1, ddof=0.5, keepdims=True, where=MASK)
of("std: options", _call, X, garbage=dirty(X), complex_args=(Z,), **OPTION)
_undefined = [nasty(np.ones((1, 2, 1)), [NAN, NAN], np.zeros((1, 2, 1)))]
of("std: axes", lambda f, x: f(x, (0, 2), ddof=1), BLOCK, nasty=_undefined, **OPTION)

# ---------------------------------------------------------------- sums of exponentials

LOGITS = [[-INF] * 3, [INF, 2, INF], [-INF, 1000, 1000], [-INF, 0, -INF], [-1e300, 0, -800]]
SHARES = np.array([[0, 0, 0], [0.5, 0, 0.5], [0, 0.5, 0.5], [0, 1, 0], [0, 1, 0]])
SUMS = [-INF, INF, 1000 + LOG_2, 0, 0]
LOGS = [[-INF] * 3, [-LOG_2, -INF, -LOG_2], [-INF, -LOG_2, -LOG_2], [-INF, 0, -INF], LOGITS[4]]
_counts = np.isfinite(LOGS)
LOG_CTS = _counts - _counts.sum(-1, keepdims=True) * SHARES
ONES = np.ones((1, 1, 1))
# Terms that cancel; a factor that is zero, and a negative sum.
CANCEL = Nasty(
    np.ones((1, 1, 2)), 2 * np.array([[[1.0, -1]]]), value=[-INF * ONES, 0 * ONES],
    cts=[np.zeros((1, 1, 2))] * 2,
)
SIGNED = Nasty(
    np.array([[[INF, 1.0, -INF]]]), np.array([[[0.0, -3.0, 2.0]]]),
    value=[(1 + np.log(3)) * ONES, -ONES],
    cts=[np.array([[[0, 1.0, 0]]]), np.array([[[0, -1 / 3, 0]]])],
)
FACTORS = 0.5 + rng.random((3, 5))
_call = lambda f, a, b: f(a, (0, 2), b, keepdims=True, return_sign=True)
of("logsumexp", call, ONE_D, nasty=[nasty(np.zeros(0), -INF, np.zeros(0))],
    half=(normal(1500),))
of("logsumexp: axis", lambda f, a: f(a, -1), X, nasty=[nasty(LOGITS, SUMS, SHARES)], **OPTION)
of(*("logsumexp: factors", _call, BLOCK, normal(2, 3, 1)),
    half=(normal(40, 2, 30), 1 + normal(40, 2, 1) ** 2), nasty=[CANCEL, SIGNED])
_call = lambda f, a, b: [f(a, 1, b, where=MASK), f(a, 0, where=MASK)]
of("logsumexp: where", _call, X, FACTORS, garbage=dirty(X) + dirty(FACTORS), **OPTION)
_last = nasty([0, 0, -INF, -INF], [LOG_2, 0, -INF, -INF], [0.5, 1.5, 0, 0])
_call = lambda f, x: f(x, -1, reverse=True)
of("cumlogsumexp", call, ONE_D, transforms=False)
of("cumlogsumexp: options", _call, X, nasty=[_last], **OPTION)
for _name, _values, _cts in (("softmax", SHARES, 0 * SHARES), ("log_softmax", LOGS, LOG_CTS)):
    of(_name, call, ONE_D, nasty=[nasty(LOGITS, _values, _cts)], half=(normal(700),))
    of(f"{_name}: axes", lambda f, x: f(x, (0, 1)), X, **OPTION)
    _call = lambda f, x: f(x, 0, where=MASK)
    of(f"{_name}: where", _call, X, garbage=dirty(X), counts=lambda out: MASK, **OPTION)
IMPOSSIBLE = [
    nasty([0, 1, 1e-300], 690.7755278982137e-300, [0, -1, 689.7755278982137]),
    nasty([-0.5, 0.5], -INF, [0, LOG_2 - 1]),
    nasty([0.0, 0.5], 0.5 * LOG_2, [0, LOG_2 - 1], [NAN, -2]),
]
P = abs(X)
of("entropy", call, P[0], nasty=IMPOSSIBLE, half=(0.01 + 0.005 * rng.random(1000),))
of("entropy: axes", lambda f, p: f(p, (0, 1)), P, **OPTION)
of("entropy: where", lambda f, p: f(p, 0, where=MASK), P, garbage=dirty(P), **OPTION)


def _of_logarithms(p):
    """The tangent of the logarithm of zero is infinite, and its weight is zero."""
    logs = jnp.log(p)
    return safe.logsumexp(logs), safe.softmax(logs)[1:], safe.logaddexp(logs[0], logs[1])


def _of_weights(p):
    p = p.at[0].set(0.0)
    return jnp.log(jnp.sum(p)), (p / jnp.sum(p))[1:], jnp.log(p[1])


entry(*("safe.logaddexp: of logarithms", _of_logarithms, np.array([0.0, 0.4, 0.7])),
    plain=_of_weights, **OPTION | {"orders": ("value", "jvp")})

# ---------------------------------------------------------------- distances

ANGLES = Nasty(
    np.array([[3e200, 4e200], [0, 0], [1, 2]]), np.array([[1e-200, 0], [1, 2], [2, -1]]),
    value=np.array([0.6, 0, 0]), cts=[
        np.array([[0.64 / 5e200, -0.48 / 5e200], [0, 0], [2 / 5, -1 / 5]]),
        np.array([[0, 0.8 / 1e-200], [0, 0], [1 / 5, 2 / 5]]),
    ],
)
COINCIDENT = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
PAIRS = Nasty(
    *(COINCIDENT[:1], COINCIDENT), value=np.array([[0.0, 5, 0]]),
    cts=[np.array([[-0.6, -0.8]]), np.array([[0, 0], [0.6, 0.8], [0, 0]])],
    second=[np.full((1, 2), NAN), np.array([[NAN, NAN], [0.032, -0.024], [NAN, NAN]])],
)
OWN = nasty(COINCIDENT, None, 2 * np.array([[-0.6, -0.8], [1.2, 1.6], [-0.6, -0.8]]))
_half = normal(3, 1000), normal(2, 1000)
_call = lambda f, x, y: f(x, y, axis=(0, 2))
of("cosine_similarity", call, X, X[:1] ** 2, nasty=[ANGLES], half=_half[:1] * 2,
    transforms=False)
of("cosine_similarity: axes", _call, BLOCK, normal(2, 3, 5), **OPTION)
_options = {"half": _half, "complex_args": (Z, Z[:2] * 2j), "transforms": False}
of("pairwise_distance", call, X, X[:2] ** 2, nasty=[PAIRS], **_options)
of("pairwise_distance: itself", call, BLOCK, nasty=[OWN], transforms=False)
entry(*("safe.pairwise_distance: the same array", lambda x: safe.pairwise_distance(x, x), X),
    plain=pairwise_distance, **OPTION)
for _ord in (1, INF):
    _call = lambda f, x, y, ord=_ord: f(x, y, ord=ord)
    of(f"pairwise_distance: {_ord}", _call, BLOCK, normal(1, 4, 5), **OPTION)

# ---------------------------------------------------------------- decompositions


hermitian = lambda a: (a + jnp.conj(jnp.swapaxes(a, -1, -2))) / 2


def polynomial(w, v):
    w = w + 0.3 * w**2 - 0.1 * w**3
    return (v * w[..., None, :].astype(v.dtype)) @ jnp.conj(jnp.swapaxes(v, -1, -2))


_polynomial = lambda a: a + 0.3 * a @ a - 0.1 * a @ a @ a
_matrix = normal(3, 3, scale=0.5)
_lower = np.tril(np.ones((3, 3), bool))
entry("safe.eigh", lambda a: polynomial(*safe.eigh(a)), _matrix,
    plain=lambda a: _polynomial(hermitian(a)), complex_args=(complex_normal(3, 3),),
    tolerance=1e-8, transforms=False)
# Equal eigenvalues: right to the tolerance, and to rounding divided by it.
entry("safe.eigh: equal eigenvalues", lambda a: polynomial(*safe.eigh(a, tolerance=1e-7)),
    np.diag([0.5, 0.5, 1.0]), plain=lambda a: _polynomial(hermitian(a)),
    nasty=[Nasty(np.zeros((3, 3))), Nasty(np.eye(2))], orders=("value", "jvp", "vjp"),
    precisions=("float64",), tolerance=1e-6, transforms=False)
entry("safe.eigh: lower triangle", lambda a: polynomial(*safe.eigh(a, symmetrize_input=False)),
    _matrix, plain=lambda a: _polynomial(jnp.tril(a) + jnp.conj(jnp.tril(a, -1).T)),
    garbage=dirty(_matrix, _lower), tolerance=1e-8, **OPTION)


cube = lambda u, s, vh: (u * (s**3)[..., None, :].astype(u.dtype)) @ vh
cube_plain = lambda a: a @ jnp.conj(jnp.swapaxes(a, -1, -2)) @ a


for _shape in ((3, 3), (4, 2), (2, 3)):
    entry(f"safe.svd: {_shape}", lambda a: cube(*safe.svd(a)), normal(*_shape),
        plain=cube_plain, complex_args=(complex_normal(*_shape),), tolerance=1e-8,
        tolerance32=1e-3, transforms=_shape == (3, 3),
        orders=ORDERS if _shape == (3, 3) else OPTION["orders"])
entry("safe.svd: equal singular values",
    lambda a: [cube(*safe.svd(a, tolerance=1e-7)), safe.svd(a, tolerance=1e-7).S],
    np.diag([0.5, 0.7, 1.0]),
    plain=lambda a: [cube_plain(a), jnp.linalg.svd(a, compute_uv=False)],
    nasty=[Nasty(np.eye(2), value=[np.eye(2), np.ones(2)], cts=[3 + np.eye(2)])],
    orders=("value", "jvp", "vjp"), precisions=("float64",), tolerance=1e-6, transforms=False)
