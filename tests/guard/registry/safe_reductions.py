"""`safe`: norms, sums in the logarithm, probabilities, distances; and decompositions."""

import eqx_grads as eqg
import jax.numpy as jnp
import numpy as np

from .entry import entry, Nasty, ORDERS


safe = eqg.safe
NAN, INF = np.nan, np.inf
rng = np.random.default_rng(1)
OPTION = {"transforms": False, "costs": False, "orders": ("value", "jvp", "vjp", "RR")}


def normal(*shape, shift=0.0, scale=1.0):
    return shift + scale * rng.normal(size=shape)


def complex_normal(*shape):
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def nasty(x, value, ct, second=None):
    """Of one array."""
    array = lambda x: np.asarray(x, float)
    second = None if second is None else [array(second)]
    return Nasty(
        array(x),
        value=None if value is None else array(value),
        cts=array(ct),
        second=second,
        each=True,
    )


# ---------------------------------------------------------------- norms


def norm(x, ord=2, axis=None, keepdims=False):
    size = jnp.abs(x)
    if ord == 2:
        return jnp.sqrt(jnp.sum(size**2, axis, keepdims=keepdims))
    if ord == 1:
        return jnp.sum(size, axis, keepdims=keepdims)
    return jnp.take_along_axis(size, jnp.argmax(size, axis, keepdims=True), axis).squeeze(axis)


X = np.array([[3e-200, 4e-200], [0.0, 0.0], [3e200, -4e200], [INF, -2.0], [1e-300, 1e9]])
ROWS = nasty(
    X, [5e-200, 0, 5e200, INF, 1e9], [[0.6, 0.8], [0, 0], [0.6, -0.8], [1, 0], [1e-309, 1]]
)
ZERO = nasty(np.zeros(3), 0, np.zeros(3), np.full(3, NAN))
TIES = np.array([2.0, -5.0, 5.0, 0.0])
ENDS = {
    2: [ROWS],
    1: [nasty(TIES[None], [12], [[1, -1, 1, 0]], [[0, 0, 0, NAN]])],
    INF: [
        nasty([[2, -5, 5]], [5], [[0, -0.5, 0.5]], [[0, NAN, NAN]]),
        nasty([[0, 0]], [0], [[0, 0]], [[NAN, NAN]]),
    ],
}

entry(
    "safe.norm",
    safe.norm,
    normal(7),
    plain=norm,
    nasty=[ZERO, nasty(np.zeros(0), 0, np.zeros(0))],
    half=(normal(1500),),
    complex_args=(complex_normal(7),),
)
for _ord, _nasty in ENDS.items():
    entry(
        f"safe.norm: {_ord} of an axis",
        lambda x, ord=_ord: safe.norm(x, ord, axis=-1),
        normal(3, 5),
        plain=lambda x, ord=_ord: norm(x, ord, axis=-1),
        nasty=_nasty,
        half=(normal(2, 1000),),
        complex_args=(complex_normal(3, 5),),
        **OPTION,
    )
entry(
    "safe.norm: several axes",
    lambda x: [
        safe.norm(x, axis=(0, -1), keepdims=True),
        safe.norm(x, 1, axis=1, keepdims=True),
    ],
    normal(2, 3, 5),
    plain=lambda x: [norm(x, 2, (0, 2), True), norm(x, 1, 1, True)],
    **OPTION,
)
entry(
    "safe.normalize",
    safe.normalize,
    normal(3, 5),
    plain=lambda x: x / norm(x, axis=-1, keepdims=True).astype(x.dtype),
    nasty=[
        nasty(X[:1], [[0.6, 0.8]], [[0.2 * 0.8 / 5e-200, -0.2 * 0.6 / 5e-200]]),
        nasty(
            X[1:4],
            [[0, 0], [0.6, -0.8], [1, 0]],
            [[0, 0], [1.4 * 0.8 / 5e200] * 1 + [1.4 * 0.6 / 5e200], [0, 0]],
        ),
    ],
    half=(normal(2, 1000),),
    complex_args=(complex_normal(3, 5),),
)
entry(
    "safe.normalize: several axes",
    lambda x: [safe.normalize(x, axis=(0, 2)), safe.normalize(x, axis=None)],
    normal(2, 3, 5),
    plain=lambda x: [x / norm(x, axis=(0, 2), keepdims=True), x / norm(x)],
    **OPTION,
)


MASK = np.array(
    [
        [True, False, True, True, False],
        [True, True, False, True, True],
        [False] * 3 + [True] * 2,
    ]
)


def dirty(x, mask=MASK):
    """With garbage where the mask is false."""
    junk = np.array([NAN, INF, -INF])[np.arange(x.size) % 3].reshape(x.shape)
    return np.where(mask, x, junk)


_x = normal(3, 5)
entry(
    "safe.std",
    safe.std,
    normal(7),
    plain=jnp.std,
    nasty=[
        nasty([0.1] * 3, 0, np.zeros(3), np.full(3, NAN)),
        nasty([7.0], 0, [0], [0]),
        nasty([-1e200, 1e200], 1e200, [-0.5, 0.5]),
        nasty([3e-200, 1e-200], 1e-200, [0.5, -0.5]),
    ],
    half=(normal(1500, shift=3.0),),
)
entry(
    "safe.std: options",
    lambda x: safe.std(x, -1, ddof=0.5, keepdims=True, where=MASK),
    _x,
    plain=lambda x: jnp.std(x, -1, ddof=0.5, keepdims=True, where=MASK),
    garbage=(dirty(_x),),
    complex_args=(complex_normal(3, 5),),
    **OPTION,
)
entry(
    "safe.std: several axes",
    lambda x: safe.std(x, (0, 2), ddof=1),
    normal(2, 3, 5),
    plain=lambda x: jnp.std(x, (0, 2), ddof=1),
    nasty=[nasty(np.ones((1, 2, 1)), [NAN, NAN], np.zeros((1, 2, 1)))],
    **OPTION,
)

# ---------------------------------------------------------------- sums in the logarithm


def logsumexp(a, axis=None, b=None, keepdims=False, where=True):
    total = jnp.sum(
        jnp.exp(a) if b is None else b * jnp.exp(a), axis, keepdims=keepdims, where=where
    )
    return jnp.log(jnp.abs(total)), jnp.sign(total)


def softmax(x, axis=-1, where=True):
    e = jnp.where(where, jnp.exp(x), 0)
    return e / jnp.sum(e, axis, keepdims=True)


LOGITS = [
    [-INF, -INF, -INF],
    [INF, 2, INF],
    [-INF, 1000, 1000],
    [-INF, 0, -INF],
    [-1e300, 0, -800],
]
SHARES = [[0, 0, 0], [0.5, 0, 0.5], [0, 0.5, 0.5], [0, 1, 0], [0, 1, 0]]
_sums = [-INF, INF, 1000 + np.log(2), 0, 0]
_b = 0.5 + rng.random((3, 5))
entry(
    "safe.logsumexp",
    safe.logsumexp,
    normal(7),
    plain=lambda a: logsumexp(a)[0],
    nasty=[nasty(np.zeros(0), -INF, np.zeros(0))],
    half=(normal(1500),),
)
entry(
    "safe.logsumexp: an axis",
    lambda a: safe.logsumexp(a, -1),
    normal(2, 3),
    plain=lambda a: logsumexp(a, -1)[0],
    nasty=[nasty(LOGITS, _sums, SHARES)],
    **OPTION,
)
entry(
    "safe.logsumexp: factors and signs",
    lambda a, b: safe.logsumexp(a, (0, 2), b, keepdims=True, return_sign=True),
    normal(2, 3, 5),
    normal(2, 3, 1),
    plain=lambda a, b: logsumexp(a, (0, 2), b, True),
    half=(normal(40, 2, 30), 1 + normal(40, 2, 1) ** 2),
    nasty=[
        # Terms that cancel, a factor that is zero and a negative sum.
        Nasty(
            np.array([[[1.0, 1.0]], [[INF, -INF]], [[0.0, 0.0]]])[:1],
            np.array([[[2.0, -2.0]]]),
            value=[np.full((1, 1, 1), -INF), np.zeros((1, 1, 1))],
            cts=[np.zeros((1, 1, 2))] * 2,
        ),
        Nasty(
            np.array([[[INF, 1.0, -INF]]]),
            np.array([[[0.0, -3.0, 2.0]]]),
            value=[np.full((1, 1, 1), 1 + np.log(3)), np.full((1, 1, 1), -1.0)],
            cts=[np.array([[[0, 1.0, 0]]]), np.array([[[0, -1 / 3, 0]]])],
        ),
    ],
)
entry(
    "safe.logsumexp: where",
    lambda a, b: [safe.logsumexp(a, 1, b, where=MASK), safe.logsumexp(a, 0, where=MASK)],
    _x,
    _b,
    plain=lambda a, b: [
        logsumexp(a, 1, b, False, MASK)[0],
        logsumexp(a, 0, None, False, MASK)[0],
    ],
    garbage=(dirty(_x), dirty(_b)),
    **OPTION,
)
entry(
    "safe.cumlogsumexp",
    safe.cumlogsumexp,
    normal(7),
    plain=lambda x: jnp.log(jnp.cumsum(jnp.exp(x))),
    nasty=[nasty([-INF, -INF, 0, 0], [-INF, -INF, 0, np.log(2)], [0, 0, 1.5, 0.5])],
    transforms=False,
)
entry(
    "safe.cumlogsumexp: options",
    lambda x: safe.cumlogsumexp(x, -1, reverse=True),
    normal(2, 5),
    plain=lambda x: jnp.log(jnp.cumsum(jnp.exp(x)[:, ::-1], -1))[:, ::-1],
    **OPTION,
)
_probabilities = np.log([[1, 1, 1], [1, 1, 1]]) + SHARES[1:3]
for _name, _of, _value in (
    ("softmax", lambda p: p, SHARES),
    (
        "log_softmax",
        jnp.log,
        [
            [-INF] * 3,
            [np.log(0.5), -INF, np.log(0.5)],
            [-INF, *np.log([0.5, 0.5])],
            [-INF, 0, -INF],
            [-1e300, 0, -800],
        ],
    ),
):
    _op = getattr(safe, _name)
    _n = np.sum(np.isfinite(_value), -1, keepdims=True)
    _cts = np.where(np.isfinite(_value), 1, 0) - _n * np.array(SHARES)
    entry(
        f"safe.{_name}",
        _op,
        normal(7),
        plain=lambda x, of=_of: of(softmax(x)),
        nasty=[nasty(LOGITS, _value, 0 * _cts if _name == "softmax" else _cts)],
        half=(normal(700),),
    )
    entry(
        f"safe.{_name}: options",
        lambda x, op=_op: [op(x, 0, where=MASK), op(x, (0, 1))],
        _x,
        plain=lambda x, of=_of: [
            jnp.where(MASK, of(jnp.where(MASK, softmax(x, 0, MASK), 1)), of(jnp.zeros(()))),
            of(softmax(x, (0, 1))),
        ],
        **OPTION,
    )
    entry(
        f"safe.{_name}: garbage",
        lambda x, op=_op: op(x, where=MASK),
        _x,
        plain=lambda x, of=_of: of(softmax(x, -1, MASK)),
        garbage=(dirty(_x),),
        counts=lambda out: MASK,
        orders=("value",),
        transforms=False,
    )
P = np.array([[0.2, 0.5, 0.3, 0.0, 1.0], [0.0, 1.0, 0.7, 0.3, -0.5]])
entry(
    "safe.entropy",
    safe.entropy,
    np.array([0.2, 0.5, 0.35]),
    plain=lambda p: -jnp.sum(p * jnp.log(p)),
    nasty=[
        nasty([0.0, 1.0, 1e-300], 690.7755278982137e-300, [0, -1, 689.7755278982137]),
        nasty([-0.5, 0.5], -INF, [0, np.log(2) - 1]),
        nasty([0.0, 0.5], 0.5 * np.log(2), [0, np.log(2) - 1], [NAN, -2]),
    ],
    half=(np.full(1000, 0.01) + 0.005 * rng.random(1000),),
)
entry(
    "safe.entropy: options",
    lambda p: [safe.entropy(p, (0, 1), where=MASK), safe.entropy(p, 0)],
    abs(_x),
    plain=lambda p: [-jnp.sum(p * jnp.log(p), where=MASK), -jnp.sum(p * jnp.log(p), 0)],
    **OPTION,
)
entry(
    "safe.entropy: garbage",
    lambda p: safe.entropy(p, where=MASK),
    abs(_x),
    plain=lambda p: -jnp.sum(p * jnp.log(p), -1, where=MASK),
    garbage=(dirty(abs(_x)),),
    orders=("value",),
    transforms=False,
)

# ---------------------------------------------------------------- distances

_u, _v = np.array([[3e200, 4e200], [0, 0], [1, 2]]), np.array([[1e-200, 0], [1, 2], [2, -1]])
entry(
    "safe.cosine_similarity",
    safe.cosine_similarity,
    normal(3, 5),
    normal(1, 5),
    plain=lambda x, y: jnp.sum(x * y, -1) / (norm(x, 2, -1) * norm(y, 2, -1)),
    nasty=[
        Nasty(
            _u,
            _v,
            value=np.array([0.6, 0, 0]),
            cts=[
                np.array([[0.64 / 5e200, -0.48 / 5e200], [0, 0], [2 / 5, -1 / 5]]),
                np.array([[0, 0.8 / 1e-200], [0, 0], [1 / 5, 2 / 5]]),
            ],
        )
    ],
    half=(normal(2, 1000), normal(2, 1000)),
    transforms=False,
)
entry(
    "safe.cosine_similarity: axes",
    lambda x, y: safe.cosine_similarity(x, y, axis=(0, 2)),
    normal(2, 3, 5),
    normal(2, 3, 5),
    plain=lambda x, y: jnp.sum(x * y, (0, 2)) / (norm(x, 2, (0, 2)) * norm(y, 2, (0, 2))),
    **OPTION,
)


def distances(x, y, ord=2):
    return norm(x[..., :, None, :] - y[..., None, :, :], ord, -1)


def own_distances(x):
    """Without those to itself, whose derivatives are zero."""
    same = jnp.eye(x.shape[-2], dtype=bool)
    gap = x[..., :, None, :] - x[..., None, :, :]
    return jnp.where(same, 0, norm(jnp.where(same[..., None], 1, gap), 2, -1))


COINCIDENT = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
entry(
    "safe.pairwise_distance",
    safe.pairwise_distance,
    normal(2, 3),
    normal(3, 3),
    plain=distances,
    nasty=[
        Nasty(
            COINCIDENT[:1],
            COINCIDENT,
            value=np.array([[0.0, 5, 0]]),
            cts=[np.array([[-0.6, -0.8]]), np.array([[0, 0], [0.6, 0.8], [0, 0]])],
            second=[np.full((1, 2), NAN), np.array([[NAN, NAN], [0.032, -0.024], [NAN, NAN]])],
        )
    ],
    half=(normal(3, 1000), normal(2, 1000)),
    complex_args=(complex_normal(2, 3), complex_normal(3, 3)),
    transforms=False,
)
entry(
    "safe.pairwise_distance: itself",
    lambda x: [safe.pairwise_distance(x), safe.pairwise_distance(x, x)],
    normal(2, 4, 3),
    plain=lambda x: [own_distances(x)] * 2,
    nasty=[nasty(COINCIDENT, None, 4 * np.array([[-0.6, -0.8], [1.2, 1.6], [-0.6, -0.8]]))],
    transforms=False,
)
for _ord in (1, INF):
    entry(
        f"safe.pairwise_distance: {_ord}",
        lambda x, y, ord=_ord: safe.pairwise_distance(x, y, ord=ord),
        normal(2, 2, 3),
        normal(1, 4, 3),
        plain=lambda x, y, ord=_ord: distances(x, y, ord),
        **OPTION,
    )

# ---------------------------------------------------------------- decompositions


def hermitian(a):
    return (a + jnp.conj(jnp.swapaxes(a, -1, -2))) / 2


def polynomial(w, v):
    w = w + 0.3 * w**2 - 0.1 * w**3
    return (v * w[..., None, :].astype(v.dtype)) @ jnp.conj(jnp.swapaxes(v, -1, -2))


def _polynomial(a):
    return a + 0.3 * a @ a - 0.1 * a @ a @ a


_matrix = normal(3, 3, scale=0.5)
_lower = np.tril(np.ones((3, 3), bool))
entry(
    "safe.eigh",
    lambda a: polynomial(*safe.eigh(a)),
    _matrix,
    plain=lambda a: _polynomial(hermitian(a)),
    complex_args=(complex_normal(3, 3),),
    tolerance=1e-8,
    transforms=False,
)
entry(
    "safe.eigh: vectors",
    lambda a: [*safe.eigh(a)[:1], jnp.abs(safe.eigh(a).eigenvectors)],
    normal(2, 3, 3),
    plain=lambda a: [jnp.linalg.eigh(a)[0], jnp.abs(jnp.linalg.eigh(a)[1])],
    tolerance=1e-8,
    tolerance32=1e-3,
    **OPTION,
)
# Equal eigenvalues: right to the tolerance, and to rounding divided by it.
entry(
    "safe.eigh: equal eigenvalues",
    lambda a: polynomial(*safe.eigh(a, tolerance=1e-7)),
    np.diag([0.5, 0.5, 1.0]),
    plain=lambda a: _polynomial(hermitian(a)),
    nasty=[Nasty(np.zeros((3, 3))), Nasty(np.eye(2))],
    orders=("value", "jvp", "vjp"),
    precisions=("float64",),
    tolerance=1e-6,
    transforms=False,
)
entry(
    "safe.eigh: lower triangle",
    lambda a: polynomial(*safe.eigh(a, symmetrize_input=False)),
    _matrix,
    plain=lambda a: _polynomial(jnp.tril(a) + jnp.conj(jnp.tril(a, -1).T)),
    garbage=(dirty(_matrix, _lower),),
    tolerance=1e-8,
    **OPTION,
)


def cube(u, s, vh):
    return (u * (s**3)[..., None, :].astype(u.dtype)) @ vh


def cube_plain(a):
    return a @ jnp.conj(jnp.swapaxes(a, -1, -2)) @ a


for _shape in ((3, 3), (4, 2), (2, 3)):
    entry(
        f"safe.svd: {_shape}",
        lambda a: cube(*safe.svd(a)),
        normal(*_shape),
        plain=cube_plain,
        complex_args=(complex_normal(*_shape),),
        tolerance=1e-8,
        tolerance32=1e-3,
        transforms=_shape == (3, 3),
        orders=ORDERS if _shape == (3, 3) else OPTION["orders"],
    )
entry(
    "safe.svd: equal singular values",
    lambda a: [cube(*safe.svd(a, tolerance=1e-7)), safe.svd(a, tolerance=1e-7).S],
    np.diag([0.5, 0.7, 1.0]),
    plain=lambda a: [cube_plain(a), jnp.linalg.svd(a, compute_uv=False)],
    nasty=[Nasty(np.eye(2), value=[np.eye(2), np.ones(2)], cts=[3 + np.eye(2)])],
    orders=("value", "jvp", "vjp"),
    precisions=("float64",),
    tolerance=1e-6,
    transforms=False,
)
