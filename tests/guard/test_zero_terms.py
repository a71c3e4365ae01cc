"""Terms that are not there: what no selection takes (`zero_safe`), and the tangents of what is
not being differentiated, which a linear rule multiplies by what may not be finite.

The references are plain autodiff of the same functions, with their operands kept in range, or
with finite factors.
"""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .test_core import assert_same, give_rules, T


# ---------------------------------------------------------------- what no selection takes

Z = jnp.array([0.0, 0.5, 4.0])
_unit = lambda x: jnp.clip(x - 0.5, -0.5, 1.0)
_inside = lambda x: jnp.clip(x + 1, 1.0, 3.0)
_small = lambda x, size: jnp.array([size, 1.0, 1.0], x.dtype)
# Singular or infinite where the second function is false. The reference is the other `where`.
SINGULAR = [
    *[(f, lambda x: x > 0) for f in (
        jnp.sqrt, jax.lax.rsqrt, jnp.log, jnp.log2, lambda x: jnp.log1p(x - 1), lambda x: 1 / x,
        lambda x: x ** (-2), lambda x: x ** 0.3, lambda x: jnp.arccosh(1 + x), jnp.cbrt,
        lambda x: jnp.arctan2(x, x), jax.lax.lgamma, lambda x: jnp.sqrt(x * x),
        lambda x: jnp.sqrt(jnp.abs(x)), lambda x: jnp.sqrt(x ** 2), lambda x: jnp.sqrt(x ** 3),
        lambda x: jnp.sqrt(1 - jnp.cos(x)), lambda x: jnp.sqrt(jnp.tanh(x)),
        lambda x: jnp.log(jax.nn.sigmoid(x) - 0.5), lambda x: jnp.sqrt(jnp.maximum(x, 0)),
        lambda x: jnp.sqrt(jnp.minimum(x, 5)), lambda x: jnp.sqrt(jnp.clip(x, 0, 9)),
        lambda x: 1 / (jnp.exp(x) - 1), lambda x: 1 / jnp.expm1(x), lambda x: 1 / -x,
        lambda x: jnp.sqrt(jnp.negative(-x)), lambda x: jnp.log(3 * x),
        lambda x: jnp.log(x - 0.0), lambda x: jnp.log(jax.lax.erf(x)),
        lambda x: jnp.log(1 - jax.lax.erfc(x)), lambda x: jnp.log(x / (1 + x)),
        lambda x: jnp.sqrt(jnp.sin(x / 4)), lambda x: 1 / (jnp.cosh(x) - 1),
        lambda x: jnp.sqrt(jnp.arctan(x)), lambda x: (x ** 2.0) ** 0.5,
        lambda x: 1 / jnp.sign(x) * x, lambda x: x * jnp.inf * 0 + x,
        lambda x: jnp.sqrt(jnp.log1p(x)), lambda x: jnp.log(jnp.exp2(x) - 1),
        lambda x: jnp.log(jnp.stack([x, x])[0]), lambda x: jnp.sqrt(x[::-1])[::-1],
        lambda x: jnp.sqrt(jnp.where(x > 9, 1.0, x)), lambda x: x ** (1 / (x + 1)),
        lambda x: (2 + jnp.log(x)) * jnp.sin(x), lambda x: jnp.sqrt(_unit(x) + 0.5),
        lambda x: jnp.sqrt(0.5 - -_unit(x)), lambda x: jnp.sqrt((_unit(x) + 0.5) * 2),
        lambda x: jnp.sqrt(1 - -2 * _unit(x)), lambda x: jnp.sqrt((0.5 + _unit(x)) / 2),
        lambda x: jnp.sqrt(0.5 + jnp.maximum(_unit(x), -0.5)), lambda x: 1 / (jnp.exp(x) - 1),
        lambda x: jnp.sqrt(jnp.minimum(9, _unit(x)) + 0.5), lambda x: 1 / (-0.5 - _unit(x)),
    )],
    *[(f, lambda x: (x > 0) & (x < 1)) for f in (
        lambda x: jnp.arccos(1 - x), lambda x: jnp.arcsin(1 - x), lambda x: jnp.arctanh(1 - x),
        lambda x: jax.lax.erf_inv(1 - x), lambda x: jnp.log(1 - x) / x,
        lambda x: jnp.sqrt(x) + jnp.sqrt(1 - x), lambda x: jnp.arcsin(jnp.sin(x * jnp.pi / 2)),
    )],
    *[(f, lambda x: x < 1) for f in (
        lambda x: jnp.sqrt(1 - _unit(x)), lambda x: 1 / (_unit(x) - 1),
        lambda x: jnp.arcsin(_unit(x)), lambda x: 1 / (_unit(x) * -2 + 2),
        lambda x: 1 / jnp.maximum(_unit(x) - 1, -7), lambda x: jnp.sqrt(-_unit(x) + 1),
        lambda x: jnp.exp(100 * x), lambda x: jnp.exp2(200 * x), lambda x: jnp.expm1(100 * x),
        lambda x: jnp.sinh(-100 * x), lambda x: jnp.cosh(100 * x), lambda x: x ** 40 * 1e+30,
        lambda x: jnp.sin(jnp.exp(100 * x)), lambda x: 1 / jnp.exp(100 * x) / (4 - x),
    )],
    # Only the values of `_inside`, which is at least one, tell that these are false at zero.
    *[(jnp.sqrt, lambda x, ok=ok: ok(_inside(x))) for ok in (
        lambda x: jnp.take(x, jnp.array([7, 0, 1])) > 0.5,
        lambda x: x.at[jnp.array([7, 0, 1])].get(mode="fill", fill_value=0) > 0,
        lambda x: jnp.argsort(x) > 0, lambda x: jax.lax.top_k(9 - x, 3)[1] > 0,
        lambda x: jax.lax.top_k(jnp.array([6, 5, 4]), 3)[1] > 0,
        lambda x: (x - 0.5).astype(jnp.int32) > 0,
        lambda x: jnp.array([200, 1, 1]).astype(jnp.int8) > 0,
        lambda x: (_small(x, 1e-15) * x).astype(jnp.float16) > 0,
        lambda x: (1 + _small(x, 1e-4) * x).astype(jnp.bfloat16) > 1,
        lambda x: (_small(x, 1e-20) * x) * (_small(x, 1e-20) * x) > 0,  # may be flushed
        lambda x: (_small(x, 1e-30) * x) * (_small(x, 1e-30) * x) > 0,
        lambda x: jax.lax.clamp(5 * jnp.ones(3), x, jnp.array([0.0, 1, 2])) > 0.5,
    )],
]  # fmt: skip


twice = lambda f, ok: lambda x: jnp.where(ok(x), f(jnp.where(ok(x), x, 0.7)), x * x)


@jax.custom_jvp
def root(x):
    return jnp.sqrt(x)


root.defjvp(lambda x, t: (root(*x), 0.5 * t[0] / root(*x)))
root_of_ours = eqg.custom_jvp(jnp.sqrt)
root_of_ours.def_jvp(lambda x, t: (jnp.sqrt(*x), 0.5 * t[0] / jnp.sqrt(*x)))


# Of its two cotangents, one is at another place.
shifted = eqg.custom_vjp(lambda x, y: x + jnp.roll(y, -1))
shifted.def_fwd(lambda x, y: (shifted(x, y), None))
shifted.def_bwd(lambda _, ct: (ct, jnp.roll(ct, 1)))


def _resets(x):
    def step(h, inputs):
        x, reset = inputs
        h = jnp.where(reset, x, jnp.sqrt(h) + x)
        return h, jnp.sqrt(h)

    # The carry is zero first, and its root is not taken: neither at once nor later.
    h, ys = jax.lax.scan(step, x[0], (x, jnp.array([False, True, False])))
    return h, ys[1:]


_rows = lambda x: jnp.sqrt(x[:, None] * jnp.array([1.0, 2.0]))
_matrices = lambda x: x[:, None, None] * jnp.array([[2.0, 1.0], [1.0, 3.0]])
_solve = lambda a: jax.lax.linalg.triangular_solve(a, a, left_side=True, lower=True)
_B = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
_cond = lambda x: jax.lax.cond(x > 0.4, jnp.sqrt, lambda x: 3.0 + 0 * x, x)
# The results do not depend on the first number, which is zero. In the reference, it is 0.3.
SELECTIONS = [
    lambda x: jnp.maximum(jnp.log(x), 0.1), lambda x: jnp.minimum(1 / x, 1.9),
    lambda x: jax.lax.clamp(0.6, jnp.sqrt(x), 1.5), lambda x: jax.lax.clamp(-1.0, 1 / x, 1.9),
    lambda x: jax.lax.clamp(jnp.log(x), jnp.full(3, -0.1), jnp.full(3, 9.0)),
    lambda x: (jnp.max(jnp.sqrt(x)), jnp.min(1 / x)), lambda x: jnp.max(_rows(x), 1)[1:],
    lambda x: [take(jnp.stack([x * (x / x), x ** 2], 1), 1)[1:] for take in (jnp.max, jnp.min)],
    lambda x: jnp.max(_rows(x), 0), lambda x: jnp.sort(jnp.log(x))[1:],
    lambda x: jax.lax.cummax(jnp.log(x))[1:], lambda x: jax.lax.cummin(1 / x)[1:],
    lambda x: jax.lax.top_k(jnp.sqrt(x), 2)[0], lambda x: jnp.sqrt(x)[jnp.argmax(x)],
    lambda x: jax.lax.dynamic_slice(jnp.log(x), (jnp.argmax(x) - 1,), (2,)),
    lambda x: jnp.sqrt(x).at[0].set(x[1]), lambda x: jnp.concatenate([jnp.log(x)[1:], x[1:]]),
    lambda x: jax.lax.dynamic_update_slice(jnp.sqrt(x), x[1:], (0,)),
    lambda x: jax.lax.pad(jnp.sqrt(x), jnp.array(0.0), [(-1, 1, 1)]),
    lambda x: jnp.split(jnp.sqrt(x), [1])[1],
    lambda x: jax.lax.select(x[2] > 9, jnp.log(x), x)[1:],
    lambda x: jax.ops.segment_sum(jnp.log(x), jnp.array([7, 1, 1]), 2),
    lambda x: jax.ops.segment_max(jnp.sqrt(x), jnp.array([1, 1, 0]), 2),
    lambda x: jnp.zeros(2).at[jnp.array([1, 1, 0])].min(-jnp.sqrt(x)),
    lambda x: jnp.prod(jnp.where(x > 0.4, jnp.sqrt(x), 2.0)),
    lambda x: jnp.cumsum(jnp.log(x)[::-1])[:2], lambda x: jax.lax.cumlogsumexp(_rows(x), 1)[1:],
    lambda x: jnp.cumprod(_rows(x), 1)[1:], lambda x: jnp.prod(_rows(x), 1)[1:],
    lambda x: jnp.convolve(jnp.sqrt(x), jnp.array([2.0, 1.0]))[2:],
    lambda x: (_rows(x) @ _B)[1:], lambda x: (_B.T @ _rows(x).T)[:, 1:],
    lambda x: (_rows(x) @ jnp.sqrt(x[1:]))[1:],
    lambda x: jnp.einsum("bi,bj->jbi", _rows(x), _rows(x))[:, 1:],
    lambda x: jnp.einsum("ib,bji->bj", _rows(x).T, _matrices(x))[1:],
    lambda x: jnp.linalg.cholesky(_matrices(x))[1:], lambda x: _solve(_matrices(x))[1:],
    lambda x: jnp.linalg.svd(_matrices(x))[0][1:],
    lambda x: jax.lax.cond(x[2] > 1, lambda x: jnp.where(x > 0.4, jnp.sqrt(x), 1), jnp.sin, x),
    jax.vmap(_cond), lambda x: [_cond(y) for y in x], _resets, jax.checkpoint(jax.jit(_resets)),
    lambda x: jax.lax.switch(jnp.argmax(x), [jnp.log, jnp.sqrt, lambda x: x * x[2]], x)[1:],
    lambda x: jax.lax.scan(lambda h, i: (h / 2 + jnp.sqrt(x)[i], jnp.log(x)[1:] * h),
                           jnp.array(1.0), jnp.array([1, 2, 1]), reverse=True),
    lambda x: jax.lax.fori_loop(0, 2, lambda _, h: jnp.sqrt(h), x)[1:],
    lambda x: root_of_ours(x)[1:], lambda x: jnp.where(x > 0.4, jax.jit(root)(x), 1.0),
    lambda x: shifted(x, jnp.log(x + 0.5))[1:2],
    lambda x: jnp.real(jnp.fft.ifft(jnp.fft.fft(jnp.sqrt(x[1:])))),
    lambda x: jax.lax.reduce_window(jnp.sqrt(x), -jnp.inf, jax.lax.max, (2,), (1,), "valid"),
]  # fmt: skip


def _all_modes(fns):
    """Each row has its own input, so that one derivative is the derivative of each row."""
    outputs = lambda xs: [f(x) for f, x in zip(fns, xs, strict=True)]
    wave = lambda y: jnp.cos(1 + jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)

    def run(transform, xs):
        outs, pull = jax.vjp(transform(outputs), xs)
        forward = jax.jvp(transform(outputs), (xs,), ([wave(x) for x in xs],))[1]
        return list(zip(outs, *pull(jax.tree.map(wave, outs)), forward, strict=True))

    return run


@pytest.mark.parametrize("table", ["singular", "selections"])
def test_zero_safe(table):
    """All rows in one function, which is transformed once."""
    pairs = [(f, lambda x, f=f: f(x.at[0].set(0.3))) for f in SELECTIONS]
    if table == "singular":
        masked = lambda f, ok: lambda x: jnp.where(ok(x), f(x), x * x)
        pairs = [(masked(f, ok), twice(f, ok)) for f, ok in SINGULAR]
    fns, taken = zip(*pairs, strict=True)
    xs = [Z] * len(fns)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got = jax.jit(lambda xs: _all_modes(fns)(eqg.zero_safe, xs))(xs)
        want = jax.jit(lambda xs: _all_modes(taken)(lambda f: f, xs))(xs)
    for i, row in enumerate(zip(got, want, strict=True)):
        for x, y in zip(*map(jax.tree.leaves, row), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=f"row {i}")


@pytest.mark.parametrize("policy", ["selected", "zero"])
def test_zero_safe_keeps_what_is_taken(policy):
    """A term that nothing drops stays infinite or NaN, unless an exact zero wins."""
    finite = lambda x: x if policy == "zero" else np.nan
    rows = [
        (jnp.sqrt, np.inf), (lambda x: jnp.where(x >= 0, jnp.sqrt(x), x), np.inf),
        (lambda x: jnp.maximum(jnp.sqrt(x), 0), np.inf), (lambda x: x**0.5 * x**0.5, finite(0)),
        (lambda x: jnp.minimum(jnp.maximum(jnp.sqrt(x), np.nan), np.nan), finite(0)),
        (lambda x: jnp.arctan2(x, x), np.nan), (lambda x: x / (1 + jnp.sqrt(x)), finite(1)),
        (lambda x: jnp.linalg.norm(x * jnp.ones(2)), finite(0)),
        (lambda x: jnp.sqrt(x * jnp.ones(2) @ (x * jnp.ones(2))), finite(0)),
        (lambda x: 3 * jnp.cos(x) + x * jnp.exp(x) + jnp.sin(5 * x), 6.0),
        (lambda x: jax.lax.fori_loop(0, 2, lambda _, h: jnp.sqrt(h) ** 2, x), finite(0)),
        (lambda x: jnp.abs(jax.lax.complex(x, 2 + x)) + jnp.imag(x * (1 + 5j)), 6.0),
    ]  # fmt: skip
    fns, want = zip(*rows, strict=True)
    safe = eqg.zero_safe(lambda xs: [f(x) for f, x in zip(fns, xs, strict=True)], policy=policy)
    total = lambda xs: jnp.sum(jnp.stack(safe(xs)))
    zeros = [jnp.array(0.0)] * len(rows)
    found = jax.jit(
        lambda xs: (jax.grad(total)(xs), jax.jvp(safe, (xs,), ([x + 1 for x in xs],)))
    )
    gradient, (_, forward) = found(zeros)
    np.testing.assert_allclose(gradient, want, rtol=1e-6)
    np.testing.assert_allclose(forward, want, rtol=1e-6)


def test_zero_safe_in_loops_that_end_at_other_steps():
    """In forward mode: they have no other."""

    def run(root, x):
        step = lambda c: (c[0] + 1, jnp.where(c[1] > 0, root(c[1]), 2 + c[1]))
        loop = lambda n, x: jax.lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]
        return jax.vmap(loop)(jnp.array([1, 3]), jnp.stack([x, 3 * x]))

    got = jax.jvp(eqg.zero_safe(lambda x: run(jnp.sqrt, x)), (Z,), (T,))
    kept = lambda x: run(lambda x: jnp.sqrt(jnp.where(x > 0, x, 1)), x)
    assert_same(got, jax.jvp(kept, (Z,), (T,)))


def test_zero_safe_of_a_branch_under_vmap():
    """JAX runs both branches. The root of zero is not taken."""
    f = eqg.zero_safe(lambda x: jax.lax.cond(x > 0, jnp.sqrt, lambda x: 3 * x, x))
    assert_same(jax.vmap(jax.grad(f))(Z), jnp.array([3.0, 0.5 / np.sqrt(0.5), 0.25]))


def test_zero_safe_shows_no_error_of_a_rule_that_is_not_needed():
    f = jax.custom_vjp(jnp.sqrt)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct / "x",))
    got = eqg.zero_safe(lambda x: jnp.where(x > 0, f(x), x))(Z)
    assert_same(got, jnp.sqrt(Z))


# Nothing can be singular here, as bounds of the operands tell.
HEALTHY = [
    lambda x: jnp.sqrt(1 + x * x), lambda x: jnp.log(2 + jnp.tanh(x)),
    lambda x: 1 / (2 + jnp.sin(x)), lambda x: jnp.log1p(jnp.abs(x)),
    lambda x: jnp.exp(-(x * x)) / (1 + x**2), lambda x: jnp.sqrt(jnp.maximum(x, 0.5)),
    lambda x: jnp.log(jnp.clip(x, 0.1, 2.0)), lambda x: jnp.arcsin(0.5 * jnp.cos(x)),
    lambda x: (3 - jax.lax.erf(x)) ** (-2), lambda x: jnp.log(1.5 - jax.nn.sigmoid(x)),
    lambda x: jnp.sqrt(jnp.cosh(jnp.sin(x))), lambda x: jnp.exp(jnp.minimum(x, 1.0)),
    lambda x: jax.nn.relu(jnp.tanh(x) - 0.1), lambda x: (1.5 + jnp.sin(x)) ** 0.3,
    lambda x: jax.lax.rsqrt(jnp.mean(x ** 2) + 1.0) * x,
    lambda x: jnp.where(x > 0, jnp.tanh(x), x),
    lambda x: jax.lax.scan(lambda h, x: (jnp.tanh(h + x), h), x[0], x)[1],
    lambda x: 1 / (2 - 1 / (1 + x * x)), lambda x: jnp.sqrt(3 + jnp.sort(jnp.sin(x))),
]  # fmt: skip


def test_zero_safe_costs_nothing_where_all_is_finite():
    total = lambda f: lambda x: jnp.sum(jnp.where(x > 1, f(x), x))
    size = lambda f: str(jax.make_jaxpr(jax.grad(f))(Z)).count(" = ")
    with jax.numpy_rank_promotion("allow"):
        costly = [
            i for i, f in enumerate(map(total, HEALTHY)) if size(eqg.zero_safe(f)) > size(f)
        ]
    assert not costly


# ---------------------------------------------------------------- zeros that rules multiply

X3 = jnp.array([0.5, -1.0, 2.0])
BAD = jnp.array([jnp.inf, jnp.nan, -jnp.inf])
scan = jax.lax.scan
_lower = jnp.array([[2.0, 0, 0], [1, 3, 0], [0, 1, 4]])


_twice = lambda x: 2 * x
_weighted = eqg.linear_function(lambda x, w: w * x, lambda y, w: w * y)


def _zeros_in_cond(d, t, bad, pred=True):
    branches = lambda d, t: (d * bad, t, d), lambda d, t: (d, 2 * t, 5 * t)
    return jax.lax.cond(jnp.array(pred), *branches, d, t)


# Linear in `d` and `t` together, of which the first is zero and multiplies what is not finite.
LINEAR = [
    lambda d, t, bad: (d * bad, t * T, bad * d + t),
    lambda d, t, bad: (jnp.dot(d, bad) + jnp.dot(t, T), jnp.outer(bad, d), T @ jnp.outer(t, T)),
    lambda d, t, bad: (d * bad - t, t - bad * d, -d * bad - -t),
    lambda d, t, bad: d / (1 / bad) + _weighted(d, bad) + _weighted(t, 1 / T),
    lambda d, t, bad: [jnp.where(T > 1, *x) for x in ((d * bad, t), (t, d * bad), (t, 0.0))],
    lambda d, t, bad: jnp.concatenate([d * bad, t])[::-1].reshape(2, 3).T,
    lambda d, t, bad: jnp.pad(d * bad, 1)[1:-1] + t,
    lambda d, t, bad: (d * bad)[1] + t.at[0].add((d * bad)[0]),
    lambda d, t, bad: t.at[1].set(0.0) + d.at[::2].set(t[:2], unique_indices=True),
    lambda d, t, bad: (d * bad).astype(jnp.float16).astype(t.dtype) + t,
    lambda d, t, bad: jax.lax.optimization_barrier((d * bad, t))[1],
    lambda d, t, bad: jax.jit(lambda d, t: (d * bad + t, d * bad))(d, t),
    lambda d, t, bad: jax.checkpoint(lambda d, t: (d * bad, d * bad + jnp.sin(T) * t))(d, t),
    lambda d, t, bad: jnp.zeros(3).at[jnp.array([0, 2])].add(d[:2]) * bad + t,
    lambda d, t, bad: d.at[1].set(0.0) * bad + t,
    lambda d, t, bad: jax.lax.dynamic_update_slice(jnp.zeros(3), d[:2], (0,)) * bad + t,
    lambda d, t, bad: jnp.concatenate([jnp.zeros(1), d[1:]]) * bad + jnp.cumsum(t),
    lambda d, t, bad: jax.lax.dynamic_slice(t + d * bad, (jnp.argmax(T) - 1,), (2,)),
    lambda d, t, bad: (d * bad + t[0], t - (d * bad)[0], (d * bad)[0] - t),
    lambda d, t, bad: jax.scipy.linalg.solve_triangular(_lower, d * bad + t, lower=True),
    lambda d, t, bad: jnp.linalg.solve(_lower, d * bad + t) + jnp.linalg.solve(_lower, d) * bad,
    lambda d, t, bad: jnp.convolve(T, d * bad) + jnp.convolve(t, T),
    lambda d, t, bad: jnp.real(jnp.fft.fft(jax.lax.complex(t, d * bad))),
    lambda d, t, bad: jnp.real(jnp.conj(jax.lax.complex(d * bad, t)) * (2 + 3j)),
    lambda d, t, bad: jax.lax.reduce_window(t + d * bad, 0.0, jax.lax.add, (2,), (1,), "valid"),
    lambda d, t, bad: jnp.stack(jnp.split(d * bad + t, 3)) * jnp.ones((1, 2)),
    lambda d, t, bad: jnp.einsum("i,bij->bj", t, jnp.ones((2, 3, 3))) + jnp.sum(d * bad),
    lambda d, t, bad: scan(
        lambda c, x: ((c[0] * bad, (2 + x) * c[1], c[1] + c[0] * bad), c[0] * bad + c[2]),
        (d, t, d), jnp.ones(3)),
    lambda d, t, bad: scan(lambda h, x: (h + x[0] * bad + t, x[1] + h), t,
                           (jnp.stack([d, d]), jnp.stack([t, 2 * t])), reverse=True),
    lambda d, t, bad: jax.lax.fori_loop(
        0, 3, lambda i, s: (s[0] * bad, s[1] + t * i, s[2] + s[0] * bad + s[1]), (d, t, t)),
    _zeros_in_cond, lambda d, t, bad: give_rules(eqg.custom_vjp(_twice), _twice)(d * bad + t),
    lambda d, t, bad: _zeros_in_cond(d, t, bad, False), lambda d, t, bad: jax.lax.scan(
        lambda h, _: (h + jax.jit(lambda: d * bad + t)(), None), t, None, 2)[0],
]  # fmt: skip


_all_linear = lambda d, t, bad: [leaf for f in LINEAR for leaf in jax.tree.leaves(f(d, t, bad))]


def test_terms_of_zeros_are_dropped():
    """For a forward rule, and for a backward rule whose first output is not used."""
    f = eqg.custom_jvp(lambda d, t: _all_linear(d, t, jnp.ones(3)))

    @f.def_jvp
    def f_jvp(primals, ts):
        return f(*primals), _all_linear(*ts, BAD)

    def looped(d, t, bad):
        """Of which there is only a forward mode."""
        more = lambda c: (c[0] < jnp.sum(T)) & (c[0] < 3)
        step = lambda c: (c[0] + 1, c[1] * bad, c[2] + t)
        return jax.lax.while_loop(more, step, (0, d, t))[1:]

    h = eqg.custom_jvp(lambda d, t: looped(d, t, jnp.ones(3)))
    h.def_jvp(lambda primals, ts: (h(*primals), looped(*ts, BAD)))
    assert_same(jax.jvp(lambda t: h(T, t), (T,), (X3,))[1], (0 * T, 4 * X3))
    outs = jax.eval_shape(f, T, T)
    g = eqg.custom_vjp(lambda xs: (jnp.sum(xs[0]) * T, jnp.sum(xs[1]) * T))
    g.def_fwd(lambda xs: (g(xs), None))
    g.def_bwd(lambda _, ct: (_all_linear(*ct, BAD),))
    cts = [jnp.cos(1 + jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in outs]

    @jax.jit
    def run(t):
        of_t = lambda t: f(T, t)
        forward = jax.jvp(of_t, (T,), (t,))[1]
        (reverse,) = jax.vjp(of_t, T)[1](cts)
        backward = jax.grad(lambda xs: jnp.sum(g(xs)[1] * t))(cts)
        return forward, reverse, backward

    @jax.jit
    def plain(t):
        of_t = lambda t: _all_linear(0 * t, t, jnp.ones(3))
        out, pull = jax.vjp(of_t, t)
        return out, pull(cts)[0], out

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got, want = run(X3), plain(X3)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tangent", "why"), [
    (lambda x, t: jnp.sin(t), "applies `sin`"),
    (lambda x, t: t * t, "multiplies a tangent by a tangent"),
    (lambda x, t: x * t + (jnp.zeros(3) + 1), "adds something"),
    (lambda x, t: x * t + np.array([0, 1, 0], "float32"), "adds something"),
    (lambda x, t: x, "no tangent multiplies"), (lambda x, t: x / t, "divides by a tangent"),
    (lambda x, t: t ** 3, "power 3"), (lambda x, t: jnp.where(t > 0, t, 2 * t), "applies `gt`"),
    (lambda x, t: jnp.round(t), "applies `round`"),
    (lambda x, t: t.astype(jnp.int32).astype(t.dtype), "int32"),
    (lambda x, t: jnp.dot(t, t) * x, "multiplies"),
    (lambda x, t: scan(lambda h, s: (h + s ** 2, h), 0 * x[0], t)[1], "multipl|square|power"),
    (lambda x, t: scan(lambda h, s: (h + 1, s * h), 1.0 * t[0], t)[1], "adds|multiplies"),
    (lambda x, t: jax.lax.cond(x[0] > 0, lambda t: t, lambda t: jnp.exp(t), t),
     "applies `exp`"),
    (lambda x, t: jax.lax.cond(x[0] > 9, lambda t: jnp.tanh(t), lambda t: t, t),
     "applies `tanh`"), (lambda x, t: jax.jit(jnp.abs)(t), "applies `abs`"),
    (lambda x, t: jnp.sort(t), "applies `sort`"),
    (lambda x, t: jax.lax.while_loop(lambda c: c[0] < jnp.sum(x),
     lambda c: (c[0] + 1, 2 * c[1]), (0, t))[1], "transpose"),
])  # fmt: skip
def test_a_rule_that_is_not_linear(tangent, why):
    f = eqg.custom_jvp(jnp.sin)
    f.def_jvp(lambda primals, ts: (jnp.sin(*primals), tangent(*primals, *ts)))
    with pytest.raises(eqg.RuleError, match=why):
        jax.grad(lambda x: jnp.sum(f(x)))(X3)
