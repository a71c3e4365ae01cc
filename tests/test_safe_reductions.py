"""Norms, sums of exponentials and softmaxes, with finite and right derivatives."""

import itertools

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import mpmath as mp
import numpy as np
import pytest

from . import mpmath_grid as grid


safe = eqg.safe
INF = jnp.inf


def _rows(reduction, n=2):
    """A reduction of rows as an elementwise function of the entries of a row."""
    return lambda *entries: reduction(jnp.stack(entries, axis=-1))


def _points(dtype, n=6):
    """All pairs of both signs from the smallest to the largest magnitudes; no overflow."""
    high = float(jnp.finfo(dtype).max) / 4
    positive = grid.log_spaced(dtype, n, high=grid.rounded(dtype, [high])[0])
    return grid.pairs(grid.both_signs(positive))


def _one(*point):
    return 1


def _check(programs, truth, points, dtype, ulps, scale=None):
    """Every program is within so many units of the truth, which is computed once."""
    true = grid.true_values(truth, points)
    for program in programs:
        got = grid.evaluate(program, points, dtype)
        error = max(grid.errors(got, true, points, dtype, scale), key=lambda e: e.ulps)
        assert error.ulps <= ulps, f"{dtype}: {error}"


def _check_partials(fns, truth, orders, points, dtype, ulps, scale, unit=None):
    """Both modes. `unit` of a point is the magnitude on which `truth` changes, if not each
    coordinate."""
    for order in orders:
        programs = [mode(fn, order) for fn in fns for mode in MODES]
        true = _differences(truth, order, unit) if unit else grid.partial(truth, order)
        _check(programs, true, points, dtype, ulps, scale)


MODES = (grid.forward_partial, grid.reverse_partial)


def _differences(truth, order, unit):
    """As `grid.partial`, with steps that do not depend on the one coordinate alone."""
    axes = [i for i, times in enumerate(order) for _ in range(times)]

    def derivative(*point):
        with mp.workdps(450):
            step = mp.mpf(10) ** -30 * unit(*point)
            return +difference([mp.mpf(x) for x in point], axes, step)

    def difference(point, axes, step):
        if not axes:
            return truth(*point)
        i, *others = axes
        at = lambda h: difference([*point[:i], point[i] + h, *point[i + 1 :]], others, step)
        return (at(step) - at(-step)) / (2 * step)

    return derivative


# ---------------------------------------------------------------- against mpmath
# Derivatives are compared in units of the last place of the norm of the row, which is one for
# the gradient of a norm, and for weights that sum to one.

DTYPES = ("float32", "float64", pytest.param("float16", marks=pytest.mark.slow), "bfloat16")


def _norm_truth(x, y):
    return mp.sqrt(x * x + y * y)


def _inverse_norm(x, y):
    return 1 / _norm_truth(mp.mpf(x), mp.mpf(y))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_right_at_all_magnitudes(dtype):
    fn = _rows(lambda row: safe.norm(row, axis=-1))
    points = _points(dtype)
    _check([fn], _norm_truth, points, dtype, 3)
    _check_partials([fn], _norm_truth, ((1, 0), (0, 1)), points, dtype, 3, _one)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_second_derivatives_of_norm_are_right_at_all_magnitudes(dtype):
    """In units of the last place of `1 / norm`, the largest they can be."""
    fn = _rows(lambda row: safe.norm(row, axis=-1))
    points = _points(dtype)
    _check_partials([fn], _norm_truth, ((2, 0), (1, 1)), points, dtype, 8, _inverse_norm)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normalize_is_right_at_all_magnitudes(dtype):
    fn = _rows(lambda row: safe.normalize(row)[..., 0])
    truth = lambda x, y: x / mp.sqrt(x * x + y * y)
    points = _points(dtype)
    _check([fn], truth, points, dtype, 3)
    _check_partials([fn], truth, ((1, 0), (0, 1)), points, dtype, 8, _inverse_norm)


def _std_truth(x, y, z):
    mean = (x + y + z) / 3
    return mp.sqrt(((x - mean) ** 2 + (y - mean) ** 2 + (z - mean) ** 2) / 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_std_is_right_at_all_magnitudes(dtype):
    fn = _rows(lambda row: safe.std(row, -1))
    high = grid.rounded(dtype, [float(jnp.finfo(dtype).max) / 4])[0]
    low = grid.rounded(dtype, [4 * float(jnp.finfo(dtype).tiny)])[0]
    scales = grid.log_spaced(dtype, 8, low=low, high=high)
    shapes = [(1.0, -1.0, 0.5), (0.0, 0.5, 1.0), (-1.0, -0.25, 1.0)]
    points = [tuple(s * e for e in shape) for s in scales for shape in shapes]
    points = [tuple(grid.rounded(dtype, p)) for p in points]
    _check([fn], _std_truth, points, dtype, 4)
    orders = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    largest = lambda *row: max(abs(mp.mpf(x)) for x in row)
    _check_partials([fn], _std_truth, orders, points, dtype, 4, _one, largest)


def _logsumexp_truth(*xs):
    top = max(xs)
    return top + mp.log(mp.fsum(mp.exp(x - top) for x in xs))


def _logits(dtype):
    tiny = float(jnp.finfo(dtype).tiny)
    large = grid.rounded(dtype, [float(jnp.finfo(dtype).max) / 8])[0]
    return grid.rounded(dtype, [-large, -100, -3.3, -tiny, 0.0, 0.7, 88.0, large])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_exponentials_are_right(dtype):
    fns = [
        _rows(lambda row: safe.logsumexp(row, -1)),
        safe.logaddexp,
        _rows(lambda row: safe.cumlogsumexp(row, -1)[..., -1]),
    ]
    points = grid.pairs(_logits(dtype))
    # A value near zero is a difference of two numbers near one.
    scale = lambda x, y: max(abs(x), abs(y), 1)
    _check(fns, _logsumexp_truth, points, dtype, 3, scale)
    orders = [(1, 0), (0, 1)]
    if dtype in ("float32", "float64"):
        orders.append((1, 1))
    _check_partials(fns, _logsumexp_truth, orders, points, dtype, 4, _one, _one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_is_right(name, dtype):
    fn = _rows(lambda row: getattr(safe, name)(row)[..., 0])
    if name == "softmax":
        truth = lambda x, y: 1 / (1 + mp.exp(y - x))
        scale = _one
    else:
        truth = lambda x, y: x - _logsumexp_truth(x, y)
        scale = lambda x, y: max(abs(x), abs(y), 1)
    points = grid.pairs(_logits(dtype))
    _check([fn], truth, points, dtype, 3, scale)
    _check_partials([fn], truth, ((1, 0), (0, 1)), points, dtype, 4, _one, _one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropy_is_right(dtype):
    """In units of the larger of one and the logarithm, of which the derivative is the sum."""
    fn = _rows(lambda row: safe.entropy(row))
    truth = lambda p, q: -p * mp.log(p) - q * mp.log(q)
    points = grid.pairs(grid.log_spaced(dtype, 7, high=1.0))
    scale = lambda p, q: max(abs(mp.log(p)), 1)
    _check([fn], truth, points, dtype, 4, _one)
    _check_partials([fn], truth, [(1, 0)], points, dtype, 4, scale)
    if dtype in ("float32", "float64"):
        _check_partials([fn], truth, [(2, 0)], points, dtype, 4, None)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cosine_similarity_is_right_at_all_magnitudes(dtype):
    """In units of the last place of `1 / norm`, the largest that the derivative can be."""
    other = jnp.array([0.8, -0.6], jnp.float32)

    def fn(x, y):
        return safe.cosine_similarity(jnp.stack([x, y], -1), other.astype(x.dtype))

    b = [mp.mpf(float(z)) for z in other]
    truth = lambda x, y: (x * b[0] + y * b[1]) / _norm_truth(x, y) / _norm_truth(*b)
    points = _points(dtype)
    _check([fn], truth, points, dtype, 4, _one)
    _check_partials([fn], truth, [(1, 0)], points, dtype, 8, _inverse_norm)


# ---------------------------------------------------------------- against autodiff

OPS = {
    "norm": (safe.norm, jnp.linalg.norm),
    "norm, 1": (lambda x: safe.norm(x, 1), lambda x: jnp.linalg.norm(x, 1)),
    "norm, inf": (lambda x: safe.norm(x, INF), lambda x: jnp.linalg.norm(x, INF)),
    "normalize": (safe.normalize, lambda x: x / jnp.linalg.norm(x)),
    "std": (safe.std, jnp.std),
    "std, ddof": (lambda x: safe.std(x, ddof=1), lambda x: jnp.std(x, ddof=1)),
    "logsumexp": (safe.logsumexp, jax.nn.logsumexp),
    "logsumexp, b": (
        lambda x: safe.logsumexp(x, b=x**2 - 0.5, return_sign=True)[0],
        lambda x: jax.nn.logsumexp(x, b=x**2 - 0.5, return_sign=True)[0],
    ),
    "logaddexp": (
        lambda x: safe.logaddexp(x[:2], x[1:]),
        lambda x: jnp.logaddexp(x[:2], x[1:]),
    ),
    "cumlogsumexp": (safe.cumlogsumexp, jax.lax.cumlogsumexp),
    "softmax": (safe.softmax, jax.nn.softmax),
    "log_softmax": (safe.log_softmax, jax.nn.log_softmax),
    "entropy": (
        lambda x: safe.entropy(jnp.exp(x)),
        lambda x: -jnp.sum(jnp.exp(x) * x),
    ),
    "cosine_similarity": (
        lambda x: safe.cosine_similarity(x, x**2),
        lambda x: jnp.vdot(x, x**2) / (jnp.linalg.norm(x) * jnp.linalg.norm(x**2)),
    ),
    "pairwise_distance": (
        lambda x: safe.pairwise_distance(x[:, None], x[:2, None] ** 2),
        lambda x: jnp.abs(x[:, None] - x[None, :2] ** 2),
    ),
}


def _scalar(fn):
    def loss(x):
        out = jnp.ravel(fn(x))
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype))
        return jnp.sum(weights * out)

    return loss


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPS)
def test_derivatives_are_those_of_the_textbook_form(name):
    """The first, second and third ones at an ordinary point, in both modes."""
    ours, plain = map(_scalar, OPS[name])
    with jax.enable_x64():
        x = jnp.array([0.5, -1.2, 2.0])

        @jax.jit
        def both(x):
            def derivatives(f):
                third = jax.jacfwd(jax.hessian(f))(x)
                return f(x), jax.grad(f)(x), jax.jacfwd(f)(x), jax.hessian(f)(x), third

            return derivatives(ours), derivatives(plain)

        got, expected = both(x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", OPS)
def test_they_can_be_transformed(name):
    """`vmap`, `scan` and `checkpoint`, in `jit`, against a loop over the rows."""
    ours, _ = map(_scalar, OPS[name])
    xs = jnp.array([[0.5, -1.2, 2.0], [0.3, 0.4, -0.2]])

    @jax.jit
    def run(xs):
        body = lambda total, x: (total + ours(x), None)
        scanned = lambda xs: jax.lax.scan(jax.checkpoint(body), 0.0, xs)[0]
        return [
            jnp.stack([jax.grad(ours)(x) for x in xs]),
            jax.vmap(jax.grad(ours))(xs),
            jax.grad(lambda xs: jax.vmap(ours)(xs).sum())(xs),
            jax.grad(scanned)(xs),
            jax.vmap(lambda x: jax.jvp(ours, (x,), (jnp.array([0.0, 1.0, 0.0]),))[1])(xs),
        ]

    expected, *got, along = run(xs)
    for grads in got:
        np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(along, expected[:, 1], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- kinks and infinities


def _value_and_derivatives(fn, x):
    """The value, and the gradients by both modes, which have to agree; and the Hessian."""
    loss = lambda x: jnp.sum(fn(x)).astype(x.dtype)

    @jax.jit
    def run(x):
        return fn(x), jax.grad(loss)(x), jax.jacfwd(loss)(x), jax.hessian(loss)(x)

    value, reverse, forward, hessian = run(x)
    np.testing.assert_array_equal(forward, reverse)
    return value, reverse, hessian


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("fn", "x"),
    [
        pytest.param(safe.norm, [0.0, 0.0], id="norm"),
        pytest.param(lambda x: safe.norm(x, 1), [0.0, 0.0], id="norm, 1"),
        pytest.param(lambda x: safe.norm(x, INF), [0.0, 0.0], id="norm, inf"),
        pytest.param(lambda x: safe.norm(x) ** 2, [0.0, 0.0], id="norm squared"),
        pytest.param(safe.normalize, [0.0, 0.0], id="normalize"),
        pytest.param(safe.std, [0.1, 0.1, 0.1], id="std"),
        pytest.param(safe.std, [3.0], id="std of one"),
        pytest.param(
            lambda x: safe.cosine_similarity(x, jnp.ones_like(x)), [0.0, 0.0], id="cosine"
        ),
    ],
)
def test_zero_at_kinks(fn, x, dtype):
    value, grad, hessian = _value_and_derivatives(fn, jnp.array(x, dtype))
    assert value.dtype == grad.dtype == dtype
    assert (value == 0).all()
    assert (grad == 0).all()
    # The standard deviation of one number is a constant; the others have no second derivative.
    assert (hessian == 0).all() if len(x) == 1 else jnp.isnan(hessian).all()


@pytest.mark.slow
def test_distances_of_equal_points_have_the_derivative_zero():
    points = jnp.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    distances, pull_back = jax.vjp(safe.pairwise_distance, points)
    np.testing.assert_allclose(distances, [[0, 5, 0], [5, 0, 5], [0, 5, 0]])
    (grad,) = pull_back(jnp.ones((3, 3)))
    np.testing.assert_allclose(grad, [[-1.2, -1.6], [2.4, 3.2], [-1.2, -1.6]], rtol=1e-6)
    hessian = jax.hessian(lambda x: safe.pairwise_distance(x, x + 1.0, ord=1).sum())(points)
    assert (hessian == 0).all()


@pytest.mark.parametrize(
    ("fn", "x", "value", "grad"),
    [
        (safe.logsumexp, [-INF, -INF], -INF, [0, 0]),
        (safe.logsumexp, [-INF, 1.0], 1, [0, 1]),
        (safe.logsumexp, [INF, 1.0], INF, [1, 0]),
        (safe.logsumexp, [INF, INF], INF, [0.5, 0.5]),
        (lambda x: safe.logsumexp(x, b=jnp.array([0.0, 1.0])), [INF, 1.0], 1, [0, 1]),
        (lambda x: safe.logsumexp(x, b=jnp.zeros(2)), [3.0, 1.0], -INF, [0, 0]),
        (lambda x: safe.logsumexp(x, b=jnp.array([0.0, 1.0])), [300.0, 1.0], 1, [0, 1]),
        (lambda x: safe.logsumexp(x, where=jnp.array([False, True])), [INF, 1.0], 1, [0, 1]),
        (lambda x: safe.logsumexp(x, where=jnp.array([False])), [jnp.nan, 1.0], -INF, [0, 0]),
        (lambda x: safe.logaddexp(x[0], x[1]), [-INF, -INF], -INF, [0, 0]),
        (lambda x: safe.logaddexp(x[0], x[1]), [1.0, -INF], 1, [1, 0]),
        (lambda x: safe.logaddexp(x[0], x[1]), [INF, -INF], INF, [1, 0]),
        (lambda x: safe.logaddexp(x[0], x[1]), [INF, INF], INF, [0.5, 0.5]),
        (lambda x: safe.cumlogsumexp(x)[2], [-INF, -INF, 1.0], 1, [0, 0, 1]),
        (lambda x: safe.cumlogsumexp(x)[1], [-INF, -INF, 1.0], -INF, [0, 0, 0]),
        (lambda x: safe.cumlogsumexp(x, reverse=True)[0], [1.0, -INF, -INF], 1, [1, 0, 0]),
        (safe.softmax, [-INF, -INF], [0, 0], [0, 0]),
        (lambda x: safe.softmax(x)[0], [0.0, -INF, 0.0], 0.5, [0.25, 0, -0.25]),
        (lambda x: safe.softmax(x)[0], [INF, 0.0], 1, [0, 0]),
        (lambda x: safe.softmax(x, where=jnp.array([False, True])), [INF, 0.0], [0, 1], [0, 0]),
        (safe.log_softmax, [-INF, -INF], [-INF, -INF], [0, 0]),
        (lambda x: safe.log_softmax(x)[1], [-INF, 0.0, 0.0], -np.log(2), [0, 0.5, -0.5]),
        (lambda x: safe.log_softmax(x)[0], [-INF, 0.0, 0.0], -INF, [0, 0, 0]),
        (safe.entropy, [0.0, 1.0], 0, [0, -1]),
        (lambda x: safe.entropy(x, where=jnp.array([True, False])), [1.0, INF], 0, [-1, 0]),
        (safe.norm, [INF, 1.0], INF, [1, 0]),
        (safe.norm, [3e38, 0.0], 3e38, [1, 0]),
        (
            lambda x: safe.std(x, where=jnp.array([True, True, False])),
            [1, 3, INF],
            1,
            [-0.5, 0.5, 0],
        ),
        (lambda x: safe.std(x, where=jnp.array([False])), [1.0, 3.0], jnp.nan, [0, 0]),
        (lambda x: safe.std(x, ddof=1), [1.0], jnp.nan, [0]),
        (safe.log_softmax, [INF, 0.0, INF], [-np.log(2), -INF, -np.log(2)], [0, 0, 0]),
    ],
)
def test_infinities_and_masks(fn, x, value, grad):
    got_value, got_grad, hessian = _value_and_derivatives(fn, jnp.array(x, jnp.float32))
    if fn is not safe.entropy:  # `-1 / p`
        assert jnp.isfinite(hessian).all(), hessian
    np.testing.assert_allclose(got_value, value, rtol=1e-6)
    np.testing.assert_allclose(got_grad, grad, rtol=1e-6)


def test_the_tangent_of_the_logarithm_of_zero_is_dropped():
    """Forward mode hands over the tangent `inf` of the term `-inf`."""
    p = jnp.array([0.0, 1.0])
    for fn in (safe.logsumexp, safe.softmax, safe.log_softmax, safe.cumlogsumexp):
        _, t = jax.jvp(lambda p, fn=fn: jnp.ravel(fn(jnp.log(p)))[-1], (p,), (p + 1,))
        assert jnp.isfinite(t)
    _, t = jax.jvp(lambda p: safe.logaddexp(jnp.log(p[0]), jnp.log(p[1])), (p,), (p + 1,))
    assert t == 2.0


@pytest.mark.slow
def test_nan_is_not_hidden():
    x = jnp.array([jnp.nan, 1.0])
    assert jnp.isnan(safe.std(jnp.array([INF, 1.0])))  # infinity minus itself
    for fn in (safe.norm, safe.normalize, safe.std, safe.logsumexp, safe.softmax, safe.entropy):
        assert jnp.isnan(jnp.sum(fn(x)))
        assert jnp.isnan(jax.grad(lambda x, fn=fn: jnp.sum(fn(x)))(x)).any()


def _forward_algorithm(log_a, log_b, logsumexp):
    """The log likelihood of a left-right model that begins in its first state."""

    def step(log_p, density):
        return logsumexp(log_p[:, None] + log_a, 0) + density, None

    log_p = jnp.array([0.0, -INF, -INF]) + log_b[0]
    return logsumexp(jax.lax.scan(step, log_p, log_b[1:])[0], 0)


@pytest.mark.slow
def test_expected_transitions_of_a_left_right_model():
    """Against the counts of all paths, one by one; they sum to the number of steps."""
    with jax.enable_x64():
        a = np.array([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [0.0, 0.0, 1.0]])
        b = np.asarray(jr.uniform(jr.key(0), (6, 3)))
        counts, total = np.zeros((3, 3)), 0.0
        for rest in itertools.product(range(3), repeat=5):
            steps = list(itertools.pairwise((0, *rest)))
            p = b[range(6), (0, *rest)].prod() * np.prod([a[i, j] for i, j in steps])
            total += p
            for i, j in steps:
                counts[i, j] += p
        args = jnp.log(a), jnp.log(b)
        value, grad = jax.value_and_grad(_forward_algorithm)(*args, safe.logsumexp)
        np.testing.assert_allclose(value, np.log(total), rtol=1e-12)
        np.testing.assert_allclose(grad, counts / total, rtol=1e-12)
        np.testing.assert_allclose(jnp.sum(grad), 5, rtol=1e-14)
        hessian = jax.jacfwd(jax.grad(_forward_algorithm))(*args, safe.logsumexp)
        assert jnp.isfinite(hessian).all()
        assert jnp.isnan(jax.grad(_forward_algorithm)(*args, jax.nn.logsumexp)).any()


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("axis", "keepdims"),
    [(None, False), (0, True), (-1, False), ((0, 2), True), ([1], False), ((), True)],
)
def test_axes(axis, keepdims, getkey):
    x = jr.normal(getkey(), (2, 3, 4))
    np_axis = tuple(axis) if isinstance(axis, list) else axis
    options = {"axis": axis, "keepdims": keepdims}
    expected = np.sqrt(np.sum(np.square(x), axis=np_axis, keepdims=keepdims))
    np.testing.assert_allclose(safe.norm(x, **options), expected, rtol=1e-5)
    expected = np.std(x, axis=np_axis, keepdims=keepdims)
    np.testing.assert_allclose(safe.std(x, **options), expected, rtol=1e-5, atol=1e-7)
    expected = np.log(np.sum(np.exp(x), axis=np_axis, keepdims=keepdims))
    np.testing.assert_allclose(safe.logsumexp(x, **options), expected, rtol=1e-4, atol=1e-6)
    p = safe.softmax(x, axis)
    np.testing.assert_allclose(np.sum(p, axis=np_axis), 1, rtol=1e-5)
    np.testing.assert_allclose(safe.log_softmax(x, axis), np.log(p), rtol=1e-4, atol=1e-6)
    expected = np.sum(-p * np.log(p), axis=np_axis)
    np.testing.assert_allclose(safe.entropy(p, axis), expected, rtol=1e-4, atol=1e-6)
    unit = safe.normalize(x, axis=axis)
    expected = 1 if np_axis != () else np.abs(np.sign(x))
    np.testing.assert_allclose(np.sum(unit**2, axis=np_axis), expected, rtol=1e-5)


@pytest.mark.thorough
def test_empty_arrays():
    empty = jnp.zeros((0, 3))
    assert safe.norm(empty) == safe.norm(empty.ravel(), INF) == safe.norm(empty.ravel(), 1) == 0
    assert safe.logsumexp(empty) == -INF
    assert safe.softmax(empty).shape == safe.log_softmax(empty).shape == (0, 3)
    assert safe.softmax(empty, 0).shape == safe.normalize(empty, axis=0).shape == (0, 3)
    assert safe.cumlogsumexp(empty).shape == (0, 3)
    assert (safe.logsumexp(empty, 0) == -INF).all()
    assert safe.norm(empty, axis=1).shape == (0,)
    assert safe.pairwise_distance(empty, jnp.ones((2, 3))).shape == (0, 2)
    assert jnp.isnan(safe.std(empty))
    assert safe.entropy(empty).shape == (0,)
    assert jax.grad(safe.norm)(empty).shape == (0, 3)


@pytest.mark.slow
def test_complex_numbers():
    z = jnp.array([3 + 4j, 0, 1e-30 + 1e-30j], jnp.complex64)
    assert safe.norm(z).dtype == jnp.float32
    np.testing.assert_allclose(safe.norm(z), 5)
    np.testing.assert_allclose(safe.norm(z, 1), 5)
    np.testing.assert_allclose(safe.norm(z, INF), 5)
    # JAX's gradient of a real function of a complex number is the conjugate.
    for ord in (None, 1, INF):
        grad = jax.grad(lambda z, ord=ord: safe.norm(z[:2], ord))(z)
        np.testing.assert_allclose(grad, [0.6 - 0.8j, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(safe.normalize(z[:2]), [0.6 + 0.8j, 0], rtol=1e-6)
    np.testing.assert_allclose(safe.normalize(z[2:]), [np.sqrt(0.5) * (1 + 1j)], rtol=1e-6)
    np.testing.assert_allclose(safe.std(z), np.std(z), rtol=1e-6)
    plain, ours = (jax.grad(lambda z, f=f: f(z))(z) for f in (jnp.std, safe.std))
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-7)
    assert (jax.grad(safe.std)(jnp.full(3, 0.1 + 0.3j)) == 0).all()


def test_numbers_and_integers_are_arrays():
    assert safe.norm(np.array([3, 4])) == safe.norm(jnp.array([3, 4])) == 5
    assert safe.norm(-2) == safe.norm(-2.0) == 2
    assert jax.grad(safe.norm)(-2.0) == -1
    assert safe.logaddexp(0, 0.0) == safe.logsumexp(np.zeros(2)) == jnp.log(2.0)
    assert safe.logaddexp(jnp.zeros(2, jnp.bfloat16), 0).dtype == jnp.bfloat16
    assert jax.grad(safe.logaddexp, argnums=(0, 1))(0.0, 0.0) == (0.5, 0.5)


def test_factors_and_signs():
    a, b = jnp.array([1.0, 2.0, 0.5]), jnp.array([1.0, -2.0, 0.0])
    out, sign = safe.logsumexp(a, b=b, return_sign=True)
    total = np.sum(np.asarray(b) * np.exp(a))
    np.testing.assert_allclose([out, sign], [np.log(-total), -1], rtol=1e-6)
    assert jnp.isnan(safe.logsumexp(a, b=b))
    grads = jax.grad(lambda a, b: safe.logsumexp(a, b=b, return_sign=True)[0], (0, 1))(a, b)
    np.testing.assert_allclose(grads[0], b * np.exp(a) / total, rtol=1e-6)
    np.testing.assert_allclose(grads[1], np.exp(a) / total, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: safe.norm(jr.key(0)), "`safe.norm` was given something that is not an array"),
        (lambda: safe.norm(jnp.ones(2), "fro"), "The `ord` of `safe.norm` is not a number"),
        (lambda: safe.norm(jnp.ones((2, 2)), 2), "is the norm of a matrix in NumPy"),
        (lambda: safe.norm(jnp.ones(2), axis=1), "an axis that `x` does not have"),
        (lambda: safe.std(jnp.ones(2), (0, -1)), "an axis that `x` has but once"),
        (
            lambda: safe.std(jnp.ones(2), where=jnp.ones(2)),
            "The `where` of `safe.std` has to be",
        ),
        (
            lambda: safe.softmax(jnp.ones(2, complex)),
            "`safe.softmax` was given complex numbers",
        ),
        (lambda: safe.logsumexp(jnp.ones(2, complex)), "Use the function of `jax.numpy`"),
        (lambda: safe.logsumexp(jnp.ones(2), b=jnp.ones(3)), "do not broadcast together"),
        (lambda: safe.entropy(jnp.ones(2, "complex64")), "`p` is complex64"),
        (
            lambda: safe.cosine_similarity(jnp.ones(2), jnp.ones(3)),
            "`safe.cosine_similarity` do not broadcast together",
        ),
        (lambda: safe.pairwise_distance(jnp.ones(2)), "points of one dimension"),
    ],
)
def test_errors(call, message):
    with pytest.raises(eqg.RuleError, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("masked", [1000.0, INF])
def test_a_factor_of_zero_masks_a_large_term(masked):
    """Also of a finite term whose exponential is infinite beside the others."""

    def fn(a):
        return jnp.sin(safe.logsumexp(a, b=jnp.array([1.0, 0.0, 2.0])))

    def without(a):
        return jnp.sin(jnp.logaddexp(a[0], a[2] + jnp.log(2.0)))

    a = jnp.array([0.0, masked, 1.0])
    expected = jax.hessian(without)(jnp.array([0.0, 0.0, 1.0]))
    for inner in (jax.jacfwd, jax.jacrev):
        for outer in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(jax.jit(outer(inner(fn)))(a), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_second_derivatives_of_directions_at_extreme_scales(scale):
    """In range after the chain rule, though the inverse square of the norm is not."""
    x = jnp.array([1.0, 2.0, 0.0])
    expected = jax.hessian(lambda x: jnp.sum(jnp.sin(x / jnp.linalg.norm(x))))(x)
    fn = lambda x: jnp.sum(jnp.sin(safe.normalize(scale * x)))
    for inner in (jax.jacfwd, jax.jacrev):
        for outer in (jax.jacfwd, jax.jacrev):
            np.testing.assert_allclose(jax.jit(outer(inner(fn)))(x), expected, atol=1e-6)


def test_entropy_of_a_negative_number():
    p = jnp.array([-1e-9, 0.5])
    np.testing.assert_allclose(jax.grad(safe.entropy)(p), [0.0, np.log(2) - 1], rtol=1e-6)


def test_axes_that_are_not_integers():
    with pytest.raises(eqg.RuleError, match="an axis that is not an integer"):
        safe.norm(jnp.ones(1), axis=0.5)
    for axis in (None, (0, 1)):
        with pytest.raises(eqg.RuleError, match="was not given one axis"):
            safe.cumlogsumexp(jnp.ones((2, 2)), axis)
