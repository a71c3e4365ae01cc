"""Second derivatives at kinks, poles and coincident points: right, or NaN, in all four
compositions of the two modes."""

import itertools
import pathlib
import re

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest


safe = eqg.safe
INF = jnp.inf

SECOND = {
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "forward over reverse": lambda f: jax.jacfwd(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
}


def _all_second(f, x):
    """The Hessians of a function of a vector, compiled and differentiated under `vmap`."""
    found = jax.jit(lambda x: [d(f)(x) for d in SECOND.values()])(x)
    batched = [jax.vmap(d(f))(jnp.stack([x, x]))[1] for d in SECOND.values()]
    return [np.asarray(h) for h in (*found, *batched)]


# ---------------------------------------------------------------- against mpmath
# The function in mpmath, and special points of its domain. A second derivative may be the limit
# from all sides on which the function is real, if there is one. Otherwise it is NaN.


def _norm(*x):
    return mp.sqrt(mp.fsum(t * t for t in x))


def _entropy(*p):
    return -mp.fsum(t * mp.log(t) for t in p)


def _std(*x):
    mean = mp.fsum(x) / len(x)
    return mp.sqrt(mp.fsum((t - mean) ** 2 for t in x) / len(x))


ONE = jnp.ones(2)
AT_THE_ORIGIN = [(0.0, 0.0), (0.0, 1.0)]
CASES = {
    "sqrt": (lambda z: safe.sqrt(z[0]), mp.sqrt, [(0.0,)]),
    "divide": (lambda z: safe.divide(*z), lambda x, y: x / y, [(1.0, 0.0), (0.0, 0.0)]),
    "power": (
        lambda z: safe.power(*z),
        lambda x, y: mp.power(x, y) if x > 0 else mp.mpc(0, mp.exp(x + y)),
        [(0.0, y) for y in (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5)],
    ),
    "power of a constant": (
        lambda z: safe.power(z[0], jnp.array([-0.5, 1.0, 1.5, 2.0, 2.5])).sum(),
        lambda x: mp.fsum(x ** mp.mpf(y) for y in (-0.5, 1, 1.5, 2, 2.5)),
        [(0.0,)],
    ),
    "first power": (lambda z: safe.power(z[0], 1.0), lambda x: x, [(0.0,)]),
    "square": (lambda z: safe.power(z[0], 2.0), lambda x: x * x, [(0.0,)]),
    "hypot": (lambda z: safe.hypot(*z), _norm, AT_THE_ORIGIN),
    "arctan2": (lambda z: safe.arctan2(*z), mp.atan2, AT_THE_ORIGIN),
    "arccos": (lambda z: safe.arccos(z[0]), mp.acos, [(1.0,), (-1.0,)]),
    "arcsin": (lambda z: safe.arcsin(z[0]), mp.asin, [(1.0,), (-1.0,)]),
    "log": (lambda z: safe.log(z[0]), mp.log, [(0.0,)]),
    "xlogy": (lambda z: safe.xlogy(*z), lambda x, y: x * mp.log(y), [(0.0, 0.0), (2.0, 0.0)]),
    "xlog1py": (
        lambda z: safe.xlog1py(*z),
        lambda x, y: x * mp.log1p(y),
        [(0.0, -1.0), (2.0, -1.0), (0.0, 0.0)],
    ),
    "log_cosh": (
        lambda z: safe.log_cosh(z[0]),
        lambda x: mp.log(mp.cosh(x)),
        [(0.0,)],
    ),
    "log_expm1": (lambda z: safe.log_expm1(z[0]), lambda x: mp.log(mp.expm1(x)), [(0.0,)]),
    "log_sub_exp": (
        lambda z: safe.log_sub_exp(*z),
        lambda x, y: mp.log(mp.exp(x) - mp.exp(y)),
        [(1.0, 1.0), (0.0, 0.0)],
    ),
    "log_ndtr": (
        lambda z: safe.log_ndtr(z[0]),
        lambda x: mp.log(mp.erfc(-x / mp.sqrt(2)) / 2),
        [(0.0,), (-3.0,)],
    ),
    "expm1_ratio": (lambda z: safe.expm1_ratio(z[0]), lambda x: mp.expm1(x) / x, [(0.0,)]),
    "log1p_ratio": (
        lambda z: safe.log1p_ratio(z[0]),
        lambda x: mp.log1p(x) / x,
        [(0.0,), (-1.0,)],
    ),
    "sinhc": (lambda z: safe.sinhc(z[0]), lambda x: mp.sinh(x) / x, [(0.0,)]),
    "logaddexp": (
        lambda z: safe.logaddexp(*z),
        lambda x, y: mp.log(mp.exp(x) + mp.exp(y)),
        [(1.0, 1.0)],
    ),
    "cumlogsumexp": (
        lambda z: safe.cumlogsumexp(z)[1],
        lambda x, y: mp.log(mp.exp(x) + mp.exp(y)),
        [(1.0, 1.0)],
    ),
    "logsumexp of terms that cancel": (
        lambda z: safe.logsumexp(z, b=jnp.array([1.0, -1.0]), return_sign=True)[0],
        lambda x, y: mp.log(abs(mp.exp(x) - mp.exp(y))),
        [(0.0, 0.0), (2.0, 2.0)],
    ),
    "logsumexp of no factor": (
        lambda z: safe.logsumexp(jnp.zeros(2), b=z, return_sign=True)[0],
        lambda x, y: mp.log(abs(x + y)),
        [(0.0, 0.0), (1.0, -1.0), (0.0, 1.0)],
    ),
    "softmax": (
        lambda z: safe.softmax(z)[0],
        lambda x, y: 1 / (1 + mp.exp(y - x)),
        [(1.0, 1.0)],
    ),
    "log_softmax": (
        lambda z: safe.log_softmax(z)[0],
        lambda x, y: -mp.log1p(mp.exp(y - x)),
        [(1.0, 1.0)],
    ),
    "entropy": (safe.entropy, _entropy, [(0.0, 0.0), (0.0, 1.0)]),
    "norm": (safe.norm, _norm, AT_THE_ORIGIN),
    "norm, 1": (lambda z: safe.norm(z, 1), lambda *x: mp.fsum(map(abs, x)), AT_THE_ORIGIN),
    "norm, inf": (
        lambda z: safe.norm(z, INF),
        lambda *x: max(map(abs, x)),
        [*AT_THE_ORIGIN, (1.0, -1.0), (2.0, 1.0)],
    ),
    "norm of complex numbers": (
        lambda z: safe.norm(jax.lax.complex(z[:1], z[1:])),
        _norm,
        AT_THE_ORIGIN,
    ),
    "norm, 1, of complex numbers": (
        lambda z: safe.norm(jax.lax.complex(z[:1], z[1:]), 1),
        _norm,
        AT_THE_ORIGIN,
    ),
    "normalize": (
        lambda z: safe.normalize(z)[0],
        lambda x, y: x / _norm(x, y),
        AT_THE_ORIGIN,
    ),
    "cosine_similarity": (
        lambda z: safe.cosine_similarity(z, ONE),
        lambda x, y: (x + y) / _norm(x, y) / mp.sqrt(2),
        AT_THE_ORIGIN,
    ),
    "std": (safe.std, _std, [(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]),
    "std of complex numbers": (
        lambda z: safe.std(jax.lax.complex(z, 2 * z)),
        lambda *x: mp.sqrt(5) * _std(*x),
        [(1.0, 1.0), (0.0, 1.0)],
    ),
    "std of one number": (safe.std, lambda x: mp.mpf(0), [(3.0,)]),
    "pairwise_distance": (
        lambda z: safe.pairwise_distance(z[None], jnp.zeros((1, 2)))[0, 0],
        _norm,
        AT_THE_ORIGIN,
    ),
    # What is computed from a norm.
    "norm squared": (lambda z: safe.norm(z) ** 2, lambda x, y: x * x + y * y, AT_THE_ORIGIN),
    "norm of squares": (
        lambda z: safe.norm(z**2),
        lambda x, y: _norm(x * x, y * y),
        AT_THE_ORIGIN,
    ),
    "root of squares": (
        lambda z: safe.sqrt(z @ z) ** 2,
        lambda x, y: x * x + y * y,
        AT_THE_ORIGIN,
    ),
    "RBF of a norm": (
        lambda z: jnp.exp(-(safe.norm(z) ** 2) / 2),
        lambda x, y: mp.exp(-(x * x + y * y) / 2),
        AT_THE_ORIGIN,
    ),
    "Matern 3/2 of a norm": (
        lambda z: (1 + safe.norm(z)) * jnp.exp(-safe.norm(z)),
        lambda x, y: (1 + _norm(x, y)) * mp.exp(-_norm(x, y)),
        AT_THE_ORIGIN,
    ),
}
# Masks, decompositions and identities: they have no such point, or state what they do there.
NOT_HERE = {"where", "eigh", "svd", "EighResult", "SVDResult"}
# The rest of the points have at least one derivative that is not NaN.
SMOOTH = {
    *("log_cosh", "log_ndtr", "expm1_ratio", "sinhc", "logaddexp", "cumlogsumexp", "softmax"),
    *("log_softmax", "square", "first power", "std of one number"),
}


def _limit(truth, point, axes):
    """The second derivative near a point from all sides, or NaN if that has no limit."""
    found = []
    with mp.workdps(60):
        for side in itertools.product((-1, 1), (1, mp.mpf("0.3")), repeat=len(point)):
            for distance in (mp.mpf(10) ** -12, mp.mpf(10) ** -16):
                signs, sizes = side[::2], side[1::2]
                at = [p + s * a * distance for p, s, a in zip(point, signs, sizes, strict=True)]
                order = tuple(axes.count(i) for i in range(len(point)))
                found.append(mp.diff(truth, tuple(at), order, h=distance * mp.mpf(10) ** -12))
        found = [f.real if abs(f.imag) < 1e-6 else None for f in map(mp.mpc, found)]
        inside = [float(f) for f in found if f is not None]
    spread = max(inside) - min(inside)
    return inside[0] if spread < 1e-4 * max(1, abs(inside[0])) else float("nan")


def test_every_function_is_in_the_table():
    names = {name.split(",")[0].split(" of ")[0] for name in CASES} | NOT_HERE
    assert {name for name, fn in vars(safe).items() if name[0] != "_" and callable(fn)} <= names


@pytest.mark.thorough
@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_right_or_nan(name):
    fn, truth, points = CASES[name]
    with jax.enable_x64():
        for point in points:
            n = len(point)
            z = jnp.array(point)
            first = jax.grad(fn)(z)
            assert jnp.isfinite(first).all(), "the first derivative is a convention"
            np.testing.assert_array_equal(first, jax.jacfwd(fn)(z))
            pairs = list(itertools.product(range(n), repeat=2))
            limits = np.array([_limit(truth, point, axes) for axes in pairs]).reshape(n, n)
            for got in _all_second(fn, z):
                known = ~np.isnan(got)
                np.testing.assert_allclose(
                    got[known], limits[known], rtol=1e-3, atol=1e-3, err_msg=f"{point}"
                )
                if name in SMOOTH:
                    assert known.all(), point


def test_outside_of_the_domain_all_derivatives_are_zero():
    """They are zero on all of it, and so is their derivative."""
    for fn, x in [
        *((f, -1.0) for f in (safe.sqrt, safe.log, safe.log_expm1, safe.entropy)),
        *((f, 2.0) for f in (safe.arccos, safe.arcsin)),
        (safe.log1p_ratio, -2.0),
        (lambda x: safe.log_sub_exp(x, 1.0), 0.0),
        (lambda x: safe.power(x, 0.5), -1.0),
    ]:
        axis = {"axis": None} if fn is safe.entropy else {}
        assert jax.grad(jax.grad(lambda x, fn=fn, axis=axis: fn(x, **axis)))(x) == 0
    # An infinite argument does not move.
    for x in ([-INF, -INF], [-INF, 1.0], [INF, 1.0]):
        hessian = jax.hessian(lambda x: safe.logsumexp(x) + safe.log_softmax(x)[0])
        assert (hessian(jnp.array(x)) == 0).all()


# ---------------------------------------------------------------- what does not reach a corner


def test_what_is_constant_makes_no_nan():
    """A norm that is not differentiated, and a mask on its argument."""
    x, y = jnp.array([1.0, 2.0]), jnp.zeros(2)
    loss = lambda x, y: jnp.sum(x**3) * (1 + safe.norm(y) + safe.std(y) + safe.sqrt(y[0]))
    for second in SECOND.values():
        np.testing.assert_allclose(second(lambda x: loss(x, y))(x), np.diag(6 * x))
    masked = lambda x: safe.where(x > 0, safe.sqrt, x, 0.0).sum()
    for second in SECOND.values():
        hessian = second(masked)(jnp.array([0.0, 4.0]))
        np.testing.assert_allclose(hessian, np.diag([0.0, -1 / 32]))
    # Of masked events, an entropy is a constant.
    entropy = lambda p: safe.entropy(p, where=p > 0)
    for second in SECOND.values():
        hessian = second(entropy)(jnp.array([0.0, 0.5]))
        np.testing.assert_allclose(hessian, np.diag([0.0, -2.0]))
    std = lambda x: safe.std(x, where=jnp.array([True, False]))
    for second in SECOND.values():
        assert (second(std)(jnp.array([3.0, 1.0])) == 0).all()


# ---------------------------------------------------------------- kernels of a distance

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guides" / "my-gradient-is" / "nan.md"
# The kernels of a distance, and the factor `c` of `1 - c r**2 + ...`, if it is smooth.
KERNELS = {
    "Matern 1/2": (lambda r: mp.exp(-r), None),
    "Matern 3/2": (lambda r: (1 + mp.sqrt(3) * r) * mp.exp(-mp.sqrt(3) * r), 3 / 2),
    "Matern 5/2": (
        lambda r: (1 + mp.sqrt(5) * r + 5 * r**2 / 3) * mp.exp(-mp.sqrt(5) * r),
        5 / 6,
    ),
    "RBF": (lambda r: mp.exp(-r * r / 2), 1 / 2),
}


@pytest.fixture(scope="module")
def kernels():
    """Those of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"eqg": eqg, "jax": jax, "jnp": jnp}
    exec(next(block for block in blocks if "matern52" in block), names)
    return names["kernels"]


def _of_both(kernel):
    return lambda z: kernel(z[:2], z[2:])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_where_points_coincide(name, kernels):
    """By both points: `d2k/dx dx` is minus `d2k/dx dx'`. In all modes, compiled, batched."""
    truth, factor = KERNELS[name]
    with jax.enable_x64(), mp.workdps(120):
        f, z = _of_both(kernels[name]), jnp.array([0.3, -1.0, 0.3, -1.0])
        assert (jax.grad(f)(z) == 0).all()
        assert (jax.jacfwd(f)(z) == 0).all()
        for got in _all_second(f, z):
            if factor is None:
                assert np.isnan(got).all()
                continue
            curvature = float(mp.diff(lambda r: truth(abs(r)), mp.mpf("1e-30"), 2, h="1e-32"))
            np.testing.assert_allclose(curvature, -2 * factor, rtol=1e-8)
            expected = -2 * factor * np.kron([[1, -1], [-1, 1]], np.eye(2))
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
        third = jax.jacfwd(jax.hessian(f))(z)
        if name in ("Matern 5/2", "RBF"):
            np.testing.assert_allclose(third, 0, atol=1e-12)
        else:
            assert jnp.isnan(third).any()


def _derivative(truth, z, h):
    """By the coordinates with these numbers, of a kernel of two points."""
    of_both = lambda a, b, c, d: truth(mp.sqrt((a - c) ** 2 + (b - d) ** 2))
    point = tuple(map(mp.mpf, z))

    def true(*axes):
        order = tuple(axes.count(i) for i in range(4))
        return float(mp.diff(of_both, point, order, h=h))

    return true
