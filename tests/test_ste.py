"""Straight-through: values to the bit, gradients against plain autodiff and the papers."""

import functools as ft
import inspect
import json
import os
import pathlib
import subprocess
import sys

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError, ste


stop = jax.lax.stop_gradient


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.itemsize}")


def through(value, slope):
    """What people write. Rounds, and is NaN at infinity; its gradient is right."""
    return slope + stop(value - slope)


# ---------------------------------------------------------------- rounding, signs, steps

EDGES = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -0.3, 0.7, 1e-30, 3e4, -3e4, np.inf, -np.inf, np.nan]
ROUNDING = {
    ste.round: jnp.round,
    ste.floor: jnp.floor,
    ste.ceil: jnp.ceil,
    ste.trunc: jnp.trunc,
}


@pytest.mark.parametrize(
    ("ours", "dtype"),
    [*((f, "float32") for f in ROUNDING), (ste.round, "float16"), (ste.round, "bfloat16")],
)
def test_rounding_to_the_bit(ours, dtype):
    x = jnp.array(EDGES, dtype)
    for wrap in (lambda f: f, jax.jit, jax.vmap):
        out = wrap(ours)(x)
        assert out.dtype == dtype
        assert np.array_equal(bits(out), bits(wrap(ROUNDING[ours])(x)))
    ct = jnp.array(EDGES[::-1], dtype)
    assert np.array_equal(bits(jax.vjp(ours, x)[1](ct)[0]), bits(ct))
    assert np.array_equal(bits(jax.jvp(ours, (x,), (ct,))[1]), bits(ct))


@pytest.mark.thorough
def test_signs_and_steps():
    x = jnp.array([-np.inf, -2.0, -0.0, 0.0, 1e-30, 2.0, np.inf, np.nan], "float32")
    for f, expected in (
        (ste.sign, [-1, -1, -0.0, 0, 1, 1, 1, np.nan]),
        (ste.binary_sign, [-1, -1, 1, 1, 1, 1, 1, np.nan]),
        (ste.heaviside, [0, 0, 1, 1, 1, 1, 1, np.nan]),
        (lambda x: ste.heaviside(x, at_zero=0.5), [0, 0, 0.5, 0.5, 1, 1, 1, np.nan]),
        (ste.ternary, [-1, -1, 0, 0, 0, 1, 1, np.nan]),
        (lambda x: ste.ternary(x, threshold=2.0), [-1, 0, 0, 0, 0, 0, 1, np.nan]),
    ):
        for wrap in (lambda f: f, jax.jit):
            np.testing.assert_array_equal(wrap(f)(x), np.array(expected, "float32"))
    for dtype in ("float16", "bfloat16"):
        for f in (ste.sign, ste.binary_sign, ste.heaviside, ste.ternary):
            assert f(x.astype(dtype)).dtype == dtype


def test_ternary_thresholds():
    x = jnp.array([[0.1, -0.2, 0.3, 1.0], [5.0, -3.0, 4.0, 0.0]])
    by_mean = ste.ternary(x, threshold="mean")  # 0.7 * 13.6 / 8 = 1.19
    np.testing.assert_array_equal(by_mean, [[0, 0, 0, 0], [1, -1, 1, 0]])
    rows = ste.ternary(x, threshold=jnp.array([[0.15], [4.5]]))
    np.testing.assert_array_equal(rows, [[0, -1, 1, 1], [1, 0, 0, 0]])
    grad = jax.grad(lambda x: ste.ternary(x, threshold="mean").sum())(x)
    np.testing.assert_array_equal(grad, [[1, 1, 1, 1], [0, 0, 0, 1]])


# The functions of the papers; their derivatives are by finite differences.
PAPERS = {
    "identity": lambda x: x,
    "hard_tanh": lambda x: np.clip(x, -1, 1),
    "approx_sign": lambda x: np.where(
        np.abs(x) < 1, np.where(x < 0, 2 * x + x**2, 2 * x - x**2), np.sign(x)
    ),
    "swish_sign": lambda x: (
        2 / (1 + np.exp(-5 * x)) * (1 + 5 * x * (1 - 1 / (1 + np.exp(-5 * x)))) - 1
    ),
}


@pytest.mark.parametrize("name", PAPERS)
def test_named_backward_passes(name):
    x = np.array([-3.0, -1.2, -0.9, -0.41, -0.02, 0.3, 0.77, 1.6])
    h = 1e-6
    first = (PAPERS[name](x + h) - PAPERS[name](x - h)) / (2 * h)
    h = 1e-4
    second = (PAPERS[name](x + h) - 2 * PAPERS[name](x) + PAPERS[name](x - h)) / h**2
    f = ste.wrap(jnp.sign, backward=name)
    single = x.astype("float32")
    for grad in (jax.grad(f), jax.jacfwd(f)):
        got = jax.jit(jax.vmap(grad))(single)
        np.testing.assert_allclose(got, first, rtol=1e-5, atol=1e-6)
    orders = jax.jit(jax.vmap(lambda x: (jax.grad(f)(x), jax.grad(jax.grad(f))(x))))
    np.testing.assert_allclose(orders(single)[1], second, atol=1e-4)
    for dtype, big in (("float32", 1e30), ("bfloat16", 1e30), ("float16", 6e4)):
        for far in orders(jnp.array([-big, big], dtype)):
            assert far.dtype == dtype
            assert jnp.isfinite(far).all()
            assert name == "identity" or not far.any()


def test_ends_of_the_window():
    """A weight clipped to one can return."""
    x = jnp.array([-1.0, 1.0])
    assert jnp.array_equal(jax.grad(lambda x: ste.binary_sign(x).sum())(x), jnp.ones(2))
    soft = ste.wrap(jnp.sign, backward="approx_sign")
    assert jax.grad(soft)(0.0) == 2.0
    assert jax.grad(jax.grad(soft))(0.0) == 0.0


@pytest.mark.thorough
def test_clip():
    x = jnp.array([-3.0, -1.0, 0.5, 2.0, 7.0, np.nan])
    loss = lambda *args: jnp.sum(ste.clip(*args)[:5] * jnp.arange(1.0, 6.0))
    np.testing.assert_array_equal(ste.clip(x, -1.0, 2.0), [-1, -1, 0.5, 2, 2, np.nan])
    ct_x, ct_min, ct_max = jax.grad(loss, (0, 1, 2))(x, -1.0, 2.0)
    np.testing.assert_array_equal(ct_x, [1, 2, 3, 4, 5, 0])
    assert (ct_min, ct_max) == (1.0, 5.0)
    np.testing.assert_array_equal(ste.clip(x, max=0.0), [-3, -1, 0, 0, 0, np.nan])
    np.testing.assert_array_equal(ste.clip(x, 0.0), [0, 0, 0.5, 2, 7, np.nan])
    # An end for each; ends that cross.
    ends = jnp.array([[0.0], [1.0]])
    out = ste.clip(jnp.full((2, 3), -1.0), ends, 0.5)
    np.testing.assert_array_equal(out, [[0, 0, 0], [0.5, 0.5, 0.5]])
    total = lambda low, high: ste.clip(jnp.full((2, 3), -1.0), low, high).sum()
    ct_low, ct_high = jax.grad(total, (0, 1))(ends, 0.5)
    np.testing.assert_array_equal(ct_low, [[3], [0]])
    assert ct_high == 3.0
    assert ste.clip(jnp.ones(2, "bfloat16"), jnp.zeros(2), 3.0).dtype == "bfloat16"


@pytest.mark.slow
def test_one_hot_argmax():
    x = jnp.array([[0.3, -1.0, 0.9], [2.0, 2.0, -np.inf]])
    for axis in (-1, 0):
        out = ste.one_hot_argmax(x, axis=axis)
        np.testing.assert_array_equal(out.sum(axis), 1)
        np.testing.assert_array_equal(jnp.argmax(out, axis), jnp.argmax(x, axis))
    weight = jnp.array([[1.0, -2.0, 0.5], [0.3, 0.1, 4.0]])

    def loss(f):
        return lambda x, t: jnp.sum(weight * f(x, t))

    ours = loss(lambda x, t: ste.one_hot_argmax(x, temperature=t))
    soft = loss(lambda x, t: jax.nn.softmax(x / t, -1))
    x = jnp.array([[0.3, -1.0, 0.9], [2.0, 2.0, -0.4]])
    for transform in (lambda f: jax.grad(f, (0, 1)), lambda f: jax.jacfwd(jax.grad(f), (0, 1))):
        got, expected = (jax.jit(transform(f))(x, 0.7) for f in (ours, soft))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _sigmoids(x, t, k):
    """Sigmoids whose sum along the last axis is `k`; the threshold by Newton's method."""
    x, start = x / t, jnp.sort(x / t, -1)
    u = (
        jax.lax.stop_gradient(start[..., -k - 1 : -k] + start[..., x.shape[-1] - k :][..., :1])
        / 2
    )
    for _ in range(30):
        y = jax.nn.sigmoid(x - u)
        u = u + (y.sum(-1, keepdims=True) - k) / (y * (1 - y)).sum(-1, keepdims=True)
    return jax.nn.sigmoid(x - u)


@pytest.mark.slow
def test_top_k():
    x = jnp.array([[0.3, -1.0, 0.9, 0.2], [2.0, 2.0, -np.inf, 2.0], [np.inf, 0, 1, -np.inf]])
    for k in (1, 2, 3, 4):
        for axis, y in ((-1, x), (0, x.T)):
            mask = jnp.moveaxis(ste.top_k(y, k, axis=axis), axis, -1)
            indices = np.sort(jax.lax.top_k(x, k)[1], -1)
            np.testing.assert_array_equal([np.flatnonzero(row) for row in mask], indices)
            soft = jax.jvp(ft.partial(ste.top_k, k=k, axis=axis), (y,), (jnp.ones_like(y),))[1]
            assert np.all(np.isfinite(soft)), (k, axis)
    np.testing.assert_array_equal(ste.top_k(x, 1), ste.one_hot_argmax(x))
    assert np.isnan(ste.top_k(x.at[0, 1].set(np.nan), 2)).tolist() == [
        [True] * 4,
        [False] * 4,
        [False] * 4,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
def test_derivatives_of_top_k(k):
    weight = jnp.array([[1.0, -2.0, 0.5, 0.1], [0.3, 0.1, 4.0, 2.0]])
    x = jnp.array([[0.3, -1.0, 0.9, 0.2], [2.0, 2.0, -0.4, 1.0]])
    ours = lambda x, t: jnp.sum(weight * ste.top_k(x, k, temperature=t))
    soft = lambda x, t: jnp.sum(weight * _sigmoids(x, t, k))
    for transform in (lambda f: jax.grad(f, (0, 1)), lambda f: jax.jacfwd(jax.grad(f), (0, 1))):
        got, expected = (jax.jit(transform(f))(x, 0.7) for f in (ours, soft))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


@pytest.mark.thorough
def test_top_k_of_numbers_far_apart():
    x = jnp.array([1000.0, 500.0, 0.0])  # where all slopes underflow
    for k in (1, 2):
        np.testing.assert_allclose(jax.jacobian(ste.top_k)(x, k), 0, atol=1e-6)
    assert not np.any(jax.jacobian(ste.top_k)(x, 3))  # of all, exactly
    for k in (0, 4, True):
        with pytest.raises(
            RuleError, match=r"a number of elements that.*\n  `k` is .* has 3 along its axis\n"
        ):
            ste.top_k(x, k)


TO_LEAVES = {
    "round": ste.round,
    "floor": ste.floor,
    "ceil": ste.ceil,
    "trunc": ste.trunc,
    "sign": ste.sign,
    "binary_sign": ste.binary_sign,
    "ternary": ste.ternary,
    "heaviside": ste.heaviside,
    "clip": lambda x: ste.clip(x, -0.5, 0.5),
}


@pytest.mark.parametrize("name", ["round", "binary_sign", "ternary", "clip"])
def test_trees(name, getkey):
    f = TO_LEAVES[name]
    linear = eqx.nn.Linear(2, 3, use_bias=False, key=getkey())
    key = getkey()
    tree = (linear, {"n": jnp.arange(3), "b": True, "k": key, "f": jnp.sin, "x": 0.7}, None)
    out = f(tree)
    assert jnp.array_equal(out[0].weight, f(linear.weight))
    assert isinstance(out[1]["x"], jax.Array)
    assert (out[1]["x"].dtype, out[1]["x"]) == (jnp.asarray(0.7).dtype, f(0.7))
    for kept in ("n", "b", "k", "f"):
        assert out[1][kept] is tree[1][kept]
    grads = eqx.filter_grad(lambda m: jnp.sum(f(m).weight * 3))(linear)
    assert jnp.array_equal(grads.weight, jnp.full((3, 2), 3.0))
    assert f(np.float32(0.7)).dtype == "float32"
    assert jax.grad(f)(0.3) == jax.grad(f)(np.float32(0.3)) == 1.0


# ---------------------------------------------------------------- wrap


def test_wrap():
    @ste.wrap
    def to_grid(x, step=0.25, *, shift=0.0):
        """To a grid."""
        return jnp.round((x - shift) / step) * step

    assert to_grid(0.3) == to_grid(0.3, shift=0.0) == 0.25
    assert to_grid(0.3, 0.5, shift=0.125) == 0.0
    assert jax.grad(to_grid)(0.3) == jax.grad(to_grid)(0.3, 0.5, shift=0.125) == 1.0
    assert (to_grid.__name__, to_grid.__doc__) == ("to_grid", "To a grid.")

    @ste.wrap(backward=jnp.tanh)
    def step(x):
        return (x > 0).astype(x.dtype)

    assert step(0.3) == 1.0
    assert jnp.allclose(jax.grad(step)(0.3), 1 - jnp.tanh(0.3) ** 2)
    assert jnp.allclose(jax.hessian(step)(0.3), jax.hessian(jnp.tanh)(0.3))


def test_wrap_takes_trees_modules_and_host_functions():
    halve = ste.wrap(lambda tree: {"x": tree["x"] // 2.0, "n": tree["n"] + 1})
    tree = {"x": jnp.array([1.0, 5.0]), "n": jnp.array(3)}
    out = halve(tree)
    assert (out["x"].tolist(), out["n"]) == ([0.0, 2.0], 4)
    loss = lambda x: halve({**tree, "x": x})["x"] @ jnp.array([3.0, 4.0])
    assert jnp.array_equal(jax.grad(loss)(tree["x"]), jnp.array([3.0, 4.0]))
    named = ste.wrap(lambda t: jax.tree.map(jnp.sign, t), backward="hard_tanh")
    grad = jax.grad(lambda t: named(t)[0] + named(t)[1])((0.5, 2.0))
    assert grad == (1.0, 0.0)

    spec = jax.ShapeDtypeStruct((2,), tree["x"].dtype)
    on_host = ste.wrap(
        lambda x: jax.pure_callback(np.round, spec, x, vmap_method="expand_dims")
    )
    assert jnp.array_equal(
        jax.jit(jax.grad(lambda x: on_host(x).sum()))(tree["x"]), jnp.ones(2)
    )

    # The parameters of `backward` are learned; those of `fn` are leaves of the tree.
    scale, shift = (eqx.Partial(f, jnp.array(3.0)) for f in (jnp.multiply, jnp.add))
    f = ste.wrap(shift, backward=scale)
    assert f(2.0) == 5.0
    assert jax.grad(f)(2.0) == 3.0
    with_backward = lambda b: eqx.tree_at(lambda f: f.backward, f, b)(2.0)
    assert eqx.filter_grad(with_backward)(scale).args[0] == 2.0
    assert len(jax.tree.leaves(eqx.filter(f, eqx.is_inexact_array))) == 2


def test_wrap_casts_the_gradient():
    to_half = ste.wrap(lambda x: jnp.round(x).astype("bfloat16"))
    out, pullback = jax.vjp(to_half, jnp.array(0.7, "float32"))
    assert (out.dtype, pullback(jnp.array(3.0, "bfloat16"))[0].dtype) == ("bfloat16", "float32")
    assert pullback(jnp.array(3.0, "bfloat16"))[0] == 3.0


# ---------------------------------------------------------------- quantizers

GRIDS = {
    "fake_quantize": lambda x: ste.fake_quantize(x, 0.11, bits=4),
    "fake_quantize, unsigned": lambda x: ste.fake_quantize(x, 0.07, 5, bits=4, signed=False),
    "lsq": lambda x: ste.lsq(x, 0.11, bits=4),
    "dorefa, weights": lambda x: ste.dorefa(x, bits=4),
    "dorefa, activations": lambda x: ste.dorefa(x, bits=4, mode="activations"),
    "pact": lambda x: ste.pact(x, 0.83, bits=4),
}


HALF = [("fake_quantize", "bfloat16"), ("fake_quantize", "float16"), ("pact", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in GRIDS), *HALF])
def test_sixteen_levels_are_sixteen_values(name, dtype):
    x = jnp.linspace(-2, 2, 4001).astype(dtype)
    f = GRIDS[name]
    for wrap in (lambda f: f, jax.jit):
        out, t_out = wrap(lambda x: jax.jvp(f, (x,), (x,)))(x)
        assert out.dtype == t_out.dtype == dtype
        assert len(np.unique(np.asarray(out, float))) == 16
        assert np.array_equal(bits(wrap(f)(x)), bits(out))
    ends = {"dorefa, weights": (-1, 1), "dorefa, activations": (0, 1), "pact": (0, 0.83)}
    if name in ends:
        low, high = (jnp.array(end, dtype) for end in ends[name])
        assert (out.min(), out.max()) == (low, high)


def test_what_people_write_is_off_the_grid(getkey):
    """So the test above can fail."""
    x = jr.normal(getkey(), (4000,), "float32")
    out = ste.fake_quantize(x, 0.1, bits=4)
    assert len(np.unique(out)) == 16
    assert len(np.unique(through(out, x))) > 16


@pytest.mark.thorough
def test_values_of_a_grid():
    x = jnp.array([-np.inf, -9.0, -0.13, 0.0, 0.12, 9.0, np.inf, np.nan], "float32")
    out = ste.fake_quantize(x, 0.25, bits=3)
    np.testing.assert_array_equal(out, [-1, -1, -0.25, 0, 0, 0.75, 0.75, np.nan])
    out = ste.fake_quantize(x, 0.25, bits=3, narrow=True)
    np.testing.assert_array_equal(out, [-0.75, -0.75, -0.25, 0, 0, 0.75, 0.75, np.nan])
    out = ste.fake_quantize(x, 0.25, 2, bits=2, signed=False)
    np.testing.assert_array_equal(out, [-0.5, -0.5, -0.25, 0, 0, 0.25, 0.25, np.nan])
    out = ste.lsq(x, 0.25, bits=3)
    np.testing.assert_array_equal(out, [-1, -1, -0.25, 0, 0, 0.75, 0.75, np.nan])
    out = ste.pact(x, 1.5, bits=2)
    np.testing.assert_array_equal(out, [0, 0, 0, 0, 0, 1.5, 1.5, np.nan])
    out = ste.dorefa(x, bits=1, mode="activations")
    np.testing.assert_array_equal(out, [0, 0, 0, 0, 0, 1, 1, np.nan])
    out = ste.dorefa(x[:-1], bits=2)
    np.testing.assert_allclose(out, [-1, -1, -1 / 3, 1 / 3, 1 / 3, 1, 1], rtol=1e-6)
    assert jnp.array_equal(ste.dorefa(jnp.zeros(2), bits=1), jnp.array([-1.0, -1.0]))
    once = ste.fake_quantize(jnp.linspace(-1, 1, 999), 0.037, bits=5)
    assert jnp.array_equal(ste.fake_quantize(once, 0.037, bits=5), once)


def fake_quantize_in_plain_jax(x, scale, zero_point, low, high):
    """Every step straight through by itself, and autodiff for the rest."""
    zero_point = through(jnp.round(zero_point), zero_point)
    u = x / scale
    q = through(jnp.round(u), u) + zero_point
    q = jnp.where(q < low, low, jnp.where(q > high, high, q))  # no halves at the ends
    return (q - zero_point) * scale


@pytest.mark.parametrize("shape", [(), (3, 1)])
def test_fake_quantize_against_plain_autodiff(shape, getkey):
    """In double precision: gradients of all three, their sums, and second order."""
    with jax.enable_x64(True):
        x = jr.normal(getkey(), (3, 7), "float64")
        scale = jr.uniform(getkey(), shape, "float64", 0.1, 0.3)
        zero_point = jr.randint(getkey(), shape, -3, 3).astype("float64")
        weight = jr.normal(getkey(), (3, 7), "float64")

        def loss(f):
            return lambda *args: jnp.sum(weight * jnp.sin(f(*args)))

        with jax.numpy_rank_promotion("allow"):
            ours = loss(lambda *args: ste.fake_quantize(*args, bits=4))
            plain = loss(lambda *args: fake_quantize_in_plain_jax(*args, -8, 7))
            args = (x, scale, zero_point)
            first = lambda f: jax.grad(f, (0, 1, 2))
            second = lambda f: lambda *args: jax.jvp(first(f), args, args)[1]
            for order in (first, second):
                got, expected = (jax.jit(order(f))(*args) for f in (ours, plain))
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_where_a_grid_is_clipped_the_gradient_is_the_true_one():
    """There the value is smooth in scale and zero point: finite differences."""
    x, scale, zero_point = np.array([-5.0, 0.2, 5.0]), 0.3, 2.0
    loss = lambda s, z: jnp.sum(ste.fake_quantize(x, s, z, bits=3)[::2] * jnp.array([3.0, 5.0]))
    with jax.enable_x64(True):
        got = jax.grad(loss, (0, 1))(scale, zero_point)
        low, high = -4, 3
        value = lambda s, z: 3 * (low - z) * s + 5 * (high - z) * s
        h = 1e-6
        by_scale = (value(scale + h, zero_point) - value(scale - h, zero_point)) / (2 * h)
        by_zero = (value(scale, zero_point + h) - value(scale, zero_point - h)) / (2 * h)
        np.testing.assert_allclose(got, (by_scale, by_zero), rtol=1e-8)


def lsq_in_plain_jax(x, step, low, high, g):
    """The listing of the paper, with its two functions `gradscale` and `roundpass`."""
    step = through(step, step * g)
    u = x / step
    u = jnp.where(u <= low, low, jnp.where(u >= high, high, u))
    return through(jnp.round(u), u) * step


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(), (3, 1)])
def test_lsq_against_plain_autodiff(shape, signed, getkey):
    """In double precision, with ends that are met exactly."""
    with jax.enable_x64(True):
        step = jr.uniform(getkey(), shape, "float64", 0.1, 0.3)
        x = jr.normal(getkey(), (3, 8), "float64").at[:, 0].set(0.0)
        low, high = (-4, 3) if signed else (0, 7)
        x = x.at[:, 1].set(jnp.broadcast_to(high * step, (3, 1))[:, 0])
        sharing = 24 if shape == () else 8
        g = 1 / np.sqrt(sharing * high)

        def loss(f):
            return lambda *args: jnp.sum(jnp.sin(3 * f(*args)))

        ours = loss(lambda *args: ste.lsq(*args, bits=3, signed=signed))
        plain = loss(lambda *args: lsq_in_plain_jax(*args, low, high, g))
        got, expected = (jax.grad(f, (0, 1))(x, step) for f in (ours, plain))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        unscaled = loss(lambda *a: ste.lsq(*a, bits=3, signed=signed, gradient_scale=1.0))
        np.testing.assert_allclose(jax.grad(unscaled, 1)(x, step) * g, got[1])


@pytest.mark.slow
def test_dorefa_against_finite_differences(getkey):
    with jax.enable_x64(True):
        w = jr.normal(getkey(), (6,), "float64")
        direction = jr.normal(getkey(), (6,), "float64")
        largest = np.max(np.abs(np.tanh(w)))  # a constant
        smooth = lambda w: 2 * (np.tanh(w) / (2 * largest) + 0.5) - 1
        h = 1e-6
        expected = (smooth(w + h * direction) - smooth(w - h * direction)) / (2 * h)
        got = jax.jvp(lambda w: ste.dorefa(w, bits=3), (w,), (direction,))[1]
        np.testing.assert_allclose(got, expected, rtol=1e-8)
        value = 2 * np.round((smooth(w) + 1) / 2 * 7) / 7 - 1
        np.testing.assert_allclose(ste.dorefa(w, bits=3), value, rtol=1e-12)
    x = jnp.array([-0.1, 0.0, 0.3, 1.0, 1.1])
    for k in range(1, 9):
        activation = lambda x, k=k: ste.dorefa(x, bits=k, mode="activations").sum()
        assert jnp.array_equal(jax.grad(activation)(x), jnp.array([0.0, 1, 1, 1, 0]))


def test_pact_as_published():
    x = jnp.array([-0.1, 0.0, 0.3, 1.5, 1.6])
    for k in range(1, 9):
        f = lambda x, alpha, k=k: ste.pact(x, alpha, bits=k) @ jnp.arange(1.0, 6.0)
        ct_x, ct_alpha = jax.grad(f, (0, 1))(x, 1.5)
        assert jnp.array_equal(ct_x, jnp.array([0.0, 2, 3, 0, 0]))
        assert ct_alpha == 9.0
        assert jnp.array_equal(ste.pact(x, 1.5, bits=k)[3:], jnp.array([1.5, 1.5]))


@pytest.mark.slow
def test_the_largest_is_not_clipped_in_half_precision():
    """Rounded down, a scale of eight bits in the mantissa is too small for twelve."""
    for dtype in ("bfloat16", "float16"):
        x = jnp.linspace(1.0, 2.0, 9).astype(dtype)
        quantize = lambda x: ste.fake_quantize(x, ste.absmax_scale(x, bits=12), bits=12)
        assert jnp.array_equal(jax.vmap(jax.grad(quantize))(x), jnp.ones(9, dtype))


def test_lsq_has_one_zero():
    out = ste.lsq(jnp.array([-0.3, 0.3]), 1.0, bits=2)
    assert not np.signbit(out).any()


@pytest.mark.thorough
def test_absmax_scale():
    x = jnp.array([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]])
    assert jnp.allclose(ste.absmax_scale(x, bits=4), 2 / 7)
    assert jnp.allclose(ste.absmax_scale(x, bits=4, signed=False), 2 / 15)
    rows = ste.absmax_scale(x, bits=4, axis=1)
    assert rows.shape == (2, 1)
    out = ste.fake_quantize(x, rows, bits=4)
    assert (out[0, 1], out[1].tolist()) == (-2.0, [0.0, 0.0, 0.0])
    assert ste.absmax_scale(x, axis=(0, 1)).shape == (1, 1)
    assert ste.absmax_scale(jnp.zeros(0)) > 0
    for dtype in ("float16", "bfloat16"):
        assert ste.absmax_scale(x.astype(dtype)).dtype == dtype
    assert jnp.array_equal(jax.grad(ste.absmax_scale)(x), jnp.zeros((2, 3)))
    whole = lambda x: ste.fake_quantize(x, ste.absmax_scale(x, bits=3), bits=3).sum()
    assert jnp.array_equal(jax.grad(whole)(x), jnp.ones((2, 3)))


def test_infinities_do_not_spoil_what_is_shared():
    x = jnp.array([-np.inf, 0.3, np.inf])
    for f in (
        lambda s: ste.fake_quantize(x, s, bits=3).sum(),
        lambda s: ste.lsq(x, s, bits=3).sum(),
        lambda s: ste.pact(x, s, bits=3).sum(),
    ):
        assert jnp.isfinite(jax.jit(jax.grad(f))(0.4))
        assert jnp.isfinite(jax.jit(jax.grad(jax.grad(f)))(0.4))


# ---------------------------------------------------------------- codebooks

LEVELS = [(8, 5, 5), (7, 2, 2, 3)]


def paper_fsq(z, levels):
    """The listing of the paper, in NumPy and double precision: bound and indices."""
    levels = np.array(levels)
    half_l = (levels - 1) * (1 - 1e-3) / 2
    offset = np.where(levels % 2 == 1, 0.0, 0.5)
    bound = np.tanh(z + np.tan(offset / half_l)) * half_l - offset
    half = levels // 2
    basis = np.concatenate([[1], np.cumprod(levels[:-1])])
    return bound / half, ((np.round(bound) + half) * basis).sum(-1).astype(int)


@pytest.mark.thorough
@pytest.mark.parametrize("levels", LEVELS)
def test_fsq(levels, getkey):
    codebook = ste.fsq_codebook(levels)
    z = 3 * jr.normal(getkey(), (4000, len(levels)))
    codes, index = jax.jit(lambda z: ste.fsq(z, levels))(z)
    assert np.array_equal(bits(codes), bits(codebook[index]))
    soft, expected = paper_fsq(np.asarray(z, float), levels)
    assert np.mean(np.asarray(index) == expected) > 0.9995  # but for ties
    half = np.array(levels) // 2
    assert np.max(np.abs(np.asarray(codes, float) - soft) * half) < 0.5001
    # Every code, there and back.
    assert len(np.unique(codebook, axis=0)) == len(codebook) == np.prod(levels)
    offset = np.where(np.array(levels) % 2 == 0, 0.5, 0)
    span = (np.array(levels) - 1) * (1 - 1e-3) / 2
    bound = np.clip((np.asarray(codebook, float) * half + offset) / span, -0.9999, 0.9999)
    source = np.arctanh(bound) - np.tan(offset / span)
    back, order = ste.fsq(jnp.asarray(source), levels)
    assert np.array_equal(order, np.arange(len(codebook)))
    assert np.array_equal(bits(back), bits(codebook))


@pytest.mark.slow
def test_fsq_derivative(getkey):
    levels = (8, 5, 2)
    with jax.enable_x64(True):
        z = jr.normal(getkey(), (5, 3), "float64")
        h = 1e-6
        ends = (paper_fsq(np.asarray(z) + sign * h, levels)[0] for sign in (1, -1))
        expected = np.subtract(*ends) / (2 * h)
        f = lambda z: ste.fsq(z, levels)[0]
        forward = jax.jvp(f, (z,), (jnp.ones_like(z),))[1]
        for got in (forward, jax.grad(lambda z: f(z).sum())(z)):
            np.testing.assert_allclose(got, expected, rtol=1e-7)
    for dtype in ("float16", "bfloat16"):
        half = z.astype("float32").astype(dtype)
        codes, index = ste.fsq(half, levels)
        assert codes.dtype == dtype
        assert np.array_equal(bits(codes), bits(ste.fsq_codebook(levels, dtype)[index]))
    far = ste.fsq(jnp.array([np.inf, -np.inf, np.nan]), levels)[0]
    np.testing.assert_array_equal(far, [0.75, -1.0, np.nan])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vector_quantize(dtype, getkey):
    codebook = jr.normal(getkey(), (16, 5)).astype(dtype)
    z = jr.normal(getkey(), (2, 300, 5)).astype(dtype)
    quantized, index = jax.jit(ste.vector_quantize)(z, codebook)
    assert (quantized.shape, quantized.dtype, index.shape) == (z.shape, dtype, (2, 300))
    assert np.array_equal(bits(quantized), bits(codebook[index]))
    assert np.mean(bits(jax.jit(through)(quantized, z)) == bits(quantized)) < 0.9
    wide, entries = np.asarray(z, float), np.asarray(codebook, float)
    distances = ((wide[..., None, :] - entries) ** 2).sum(-1)
    chosen = np.take_along_axis(distances, np.asarray(index)[..., None], -1)[..., 0]
    np.testing.assert_allclose(chosen, distances.min(-1), rtol=1e-5)
    ct = jr.normal(getkey(), z.shape).astype(dtype)
    pullback = jax.vjp(lambda *args: ste.vector_quantize(*args)[0], z, codebook)[1]
    ct_z, ct_codebook = pullback(ct)
    assert jnp.array_equal(ct_z, ct)
    assert not ct_codebook.any()


def test_nearest_entries_far_from_the_origin(getkey):
    """Each entry is nearest to itself, though all are nearly the same."""
    codebook = 1e4 + jr.normal(getkey(), (64, 8))
    _, index = ste.vector_quantize(codebook, codebook)
    assert jnp.array_equal(index, jnp.arange(64))
    assert ste.vector_quantize(codebook[3], codebook)[1] == 3


# ---------------------------------------------------------------- samples


@pytest.mark.slow
def test_the_argmax_of_noisy_logits_is_distributed_as_the_softmax(getkey):
    logits = jnp.array([0.3, -1.0, 1.5, 0.0, -np.inf])
    n = 300_000
    p = np.asarray(jax.nn.softmax(logits), float)
    for sample in (lambda x, key: ste.gumbel_softmax(x, key=key, hard=True), _reinmax):
        samples = sample(jnp.broadcast_to(logits, (n, 5)), getkey())
        assert jnp.array_equal(jnp.sort(samples, -1), jnp.eye(5)[jnp.full(n, 4)])
        error = np.asarray(samples.mean(0), float) - p
        assert (np.abs(error) <= 5 * np.sqrt(p * (1 - p) / n)).all()


def _reinmax(x, key):
    return ste.reinmax(x, key=key)


@pytest.mark.slow
def test_bits_are_distributed_as_they_should(getkey):
    p = jnp.array([0.0, 0.1, 0.5, 0.93, 1.0])
    n = 300_000
    logits = jnp.broadcast_to(jnp.log(p / (1 - p)), (n, 5))
    for samples in (
        ste.bernoulli(jnp.broadcast_to(p, (n, 5)), key=getkey()),
        ste.bernoulli(jnp.broadcast_to(p, (n, 5)).astype("bfloat16"), key=getkey()),
        ste.gumbel_sigmoid(logits, key=getkey(), hard=True),
    ):
        assert set(np.unique(np.asarray(samples, float))) == {0.0, 1.0}
        q = np.asarray(p.astype(samples.dtype), float)
        error = np.asarray(samples, float).mean(0) - q
        assert (np.abs(error) <= 5 * np.sqrt(q * (1 - q) / n)).all()
    key = getkey()
    ct = jnp.arange(5.0)
    assert jnp.array_equal(jax.vjp(lambda p: ste.bernoulli(p, key=key), p)[1](ct)[0], ct)
    assert jnp.isnan(ste.bernoulli(jnp.nan, key=key))


@pytest.mark.slow
def test_a_hard_sample_has_the_gradient_of_the_soft_one(getkey):
    logits, weight, key = jr.normal(getkey(), (4, 3)), jr.normal(getkey(), (4, 3)), getkey()
    noise = jr.gumbel(key, (4, 3), logits.dtype)
    difference = jr.logistic(key, (4, 3), logits.dtype)
    cases = (
        (
            lambda x, t, hard: ste.gumbel_softmax(x, key=key, temperature=t, hard=hard),
            lambda x, t: jax.nn.softmax((x + noise) / t, -1),
        ),
        (
            lambda x, t, hard: ste.gumbel_sigmoid(x, key=key, temperature=t, hard=hard),
            lambda x, t: jax.nn.sigmoid((x + difference) / t),
        ),
    )
    for ours, plain in cases:
        assert jnp.allclose(ours(logits, 0.6, False), plain(logits, 0.6), rtol=1e-5)
        hard = ours(logits, 0.6, True)
        assert jnp.array_equal(hard, jnp.round(hard))
        losses = [lambda *a, plain=plain: jnp.sum(weight * plain(*a))]
        for hard in (False, True):
            losses.append(lambda *a, f=ours, hard=hard: jnp.sum(weight * f(*a, hard)))
        expected, *both = (jax.jit(jax.grad(f, (0, 1)))(logits, 0.6) for f in losses)
        for got in both:
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
def test_reinmax_is_right_to_second_order(getkey):
    """Its mean over all outcomes is the gradient of the mean, for a quadratic loss. That of
    the plain straight-through gradient is not."""
    with jax.enable_x64(True):
        logits = jr.normal(getkey(), (4,), "float64")
        a, b = jr.normal(getkey(), (4, 4), "float64"), jr.normal(getkey(), (4,), "float64")
        loss = lambda d: d @ a @ d + b @ d
        mean = lambda x: jax.nn.softmax(x) @ jax.vmap(loss)(jnp.eye(4))
        exact = jax.grad(mean)(logits)

        def expectation(estimator):
            @jax.jit
            @jax.vmap
            def sample_and_gradient(key):
                f = lambda x: (lambda d: (loss(d), d))(estimator(x, key))
                return jax.grad(f, has_aux=True)(logits)

            grads, samples = sample_and_gradient(jr.split(getkey(), 300))
            outcome = np.argmax(samples, -1)
            first = [np.flatnonzero(outcome == i)[0] for i in range(4)]
            return jax.nn.softmax(logits) @ grads[np.array(first)]

        np.testing.assert_allclose(expectation(_reinmax), exact, rtol=1e-10, atol=1e-12)

        def plain(x, key):
            return eqg.replace_gradient(_reinmax(x, key), jax.nn.softmax(x))

        assert np.max(np.abs(expectation(plain) - exact)) > 0.01


@pytest.mark.slow
def test_reinmax_with_temperature_as_in_the_paper(getkey):
    """Algorithm 2, as it is written."""
    logits, weight, key = jr.normal(getkey(), (3, 4)), jr.normal(getkey(), (3, 4)), getkey()
    sample = ste.reinmax(logits, key=key)

    def paper(x):
        mixed = (sample + jax.nn.softmax(x / 1.3)) / 2
        pi_1 = jax.nn.softmax(stop(jnp.log(mixed) - x) + x)
        pi_2 = 2 * pi_1 - 0.5 * jax.nn.softmax(x)
        return pi_2 - stop(pi_2) + sample

    ours = lambda x: ste.reinmax(x, key=key, temperature=1.3)
    got, expected = (
        jax.grad(lambda x, f=f: jnp.sum(weight * f(x) ** 2))(logits) for f in (ours, paper)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert jnp.array_equal(ours(logits), sample)
    impossible = logits.at[0, 0].set(-np.inf)
    grad = jax.grad(lambda x: jnp.sum(weight * ours(x)))(impossible)
    assert jnp.isfinite(grad).all()
    assert grad[0, 0] == 0.0


@pytest.mark.thorough
def test_samples_keep_half_precision(getkey):
    for dtype in ("float16", "bfloat16"):
        x = jnp.array([0.1, 0.5, 0.3], dtype)
        for f in (ste.gumbel_softmax, ste.gumbel_sigmoid, ste.bernoulli, ste.reinmax):
            sample = lambda x, f=f: f(x, key=jr.key(0))
            assert sample(x).dtype == jax.grad(lambda x, s=sample: s(x).sum())(x).dtype == dtype


# ---------------------------------------------------------------- all of them

X = np.array([[-1.7, -0.3, 0.21], [0.44, 0.81, 1.3]], "float32")
CODEBOOK = np.array([[-1.0, 0.1, 0.3], [0.5, 0.6, 1.1], [0.0, 0.0, -2.0]], "float32")
KEY = 7  # a seed: no array is made at import


def _nearest(x):
    codebook = jnp.asarray(CODEBOOK).reshape((1,) * (x.ndim - 1) + CODEBOOK.shape)
    distances = jnp.sum((x[..., None, :] - codebook) ** 2, -1)
    return jnp.asarray(CODEBOOK)[jnp.argmin(distances, -1)]


def _relaxed(x):
    return jax.nn.softmax(x + jr.gumbel(jr.key(KEY), x.shape, x.dtype), -1)


def _fsq_bound(x):
    span, offset = 4 * (1 - 1e-3) / 2, 0.0
    return (jnp.tanh(x) * span - offset) / 2


# Each op beside what plain JAX would have: a value, and a function with its gradient.
OPS = {
    "round": (ste.round, jnp.round, lambda x: x),
    "sign": (ste.sign, jnp.sign, jax.nn.hard_tanh),
    "binary_sign": (
        lambda x: ste.binary_sign(x, backward=jnp.tanh),
        lambda x: jnp.where(x < 0, -1.0, 1.0).astype(x.dtype),
        jnp.tanh,
    ),
    "ternary": (
        lambda x: ste.ternary(x, threshold=0.25),
        lambda x: jnp.where(jnp.abs(x) > 0.25, jnp.sign(x), 0),
        jax.nn.hard_tanh,
    ),
    "clip": (lambda x: ste.clip(x, -0.5, 0.5), lambda x: jnp.clip(x, -0.5, 0.5), lambda x: x),
    "one_hot_argmax": (
        lambda x: ste.one_hot_argmax(x, temperature=0.5),
        lambda x: (x == x.max(-1, keepdims=True)).astype(x.dtype),
        lambda x: jax.nn.softmax(2 * x, -1),
    ),
    "top_k": (
        lambda x: ste.top_k(x, 1, temperature=0.5),
        lambda x: (x == x.max(-1, keepdims=True)).astype(x.dtype),
        lambda x: _sigmoids(x, 0.5, 1),
    ),
    "gumbel_softmax": (
        lambda x: ste.gumbel_softmax(x, key=jr.key(KEY), hard=True),
        lambda x: (_relaxed(x) == _relaxed(x).max(-1, keepdims=True)).astype(x.dtype),
        _relaxed,
    ),
    "fake_quantize": (
        lambda x: ste.fake_quantize(x, 0.25, bits=3),
        lambda x: jnp.clip(jnp.round(x * 4), -4, 3) / 4,
        lambda x: jnp.where((x * 4 >= -4.5) & (x * 4 <= 3.5), x, 0),
    ),
    "pact": (
        lambda x: ste.pact(x, 1.0, bits=2),
        lambda x: jnp.round(jnp.clip(x, 0, 1) * 3) / 3,
        lambda x: jnp.where((x >= 0) & (x < 1), x, 0),
    ),
    "fsq": (
        lambda x: ste.fsq(x, (5, 5, 5))[0],
        lambda x: jnp.round(_fsq_bound(x) * 2) / 2,
        _fsq_bound,
    ),
    "vector_quantize": (
        lambda x: ste.vector_quantize(x, jnp.asarray(CODEBOOK))[0],
        _nearest,
        lambda x: x,
    ),
}
BY_DEFAULT = ("sign", "fake_quantize")


def everything(f):
    """A program with every transformation in it."""

    def loss(x):
        return jnp.sum(jnp.sin(x) * f(x) ** 2)

    def scanned(x):
        def body(carry, scale):
            y = f(carry * scale)
            return jnp.sin(carry + y), y

        carry, ys = jax.lax.scan(body, x, jnp.array([0.8, 1.1], x.dtype))
        return jnp.sum(carry**2) + jnp.sum(ys**2)

    def program(x):
        batch = jnp.stack([x, 0.9 * x])
        return {
            "value": f(x),
            "grad": jax.grad(loss)(x),
            "jvp": jax.jvp(f, (x,), (jnp.cos(x),)),
            "vmap(grad)": jax.vmap(jax.grad(loss))(batch),
            "grad(vmap)": jax.grad(lambda b: jnp.sum(jax.vmap(loss)(b)))(batch),
            "scan": jax.grad(scanned)(x),
            "checkpoint": eqx.filter_grad(eqx.filter_checkpoint(loss))(x),
            "cond": jax.grad(lambda x: jax.lax.cond(x[0, 0] < 0, loss, jnp.sum, x))(x),
            "second order": jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x),
            "forward over reverse": jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),))[1],
        }

    return program


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in OPS],
)
def test_every_transformation(name):
    ours, value, slope = OPS[name]
    got, expected = (
        jax.jit(everything(f))(jnp.asarray(X))
        for f in (ours, lambda x: through(value(x), slope(x)))
    )
    for key in expected:
        for a, b in zip(jax.tree.leaves(got[key]), jax.tree.leaves(expected[key]), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-6, err_msg=key)


@pytest.mark.parametrize("name", ["round", "fake_quantize", "vector_quantize"])
def test_eagerly(name):
    ours, value, slope = OPS[name]
    got, expected = (
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(x) * f(x) ** 2))(jnp.asarray(X))
        for f in (ours, lambda x: through(value(x), slope(x)))
    )
    np.testing.assert_allclose(got, expected, rtol=3e-5, atol=3e-6)


# ---------------------------------------------------------------- cost


STEPS = 20


def kept(f, x):
    """What the backward pass of a scan needs, in bytes."""
    loop = lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, STEPS)[0]
    return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(loop, x)[1]))


@pytest.mark.cost
def test_cost():
    x = jnp.ones(1000, "float32")
    flops = lambda f: jax.jit(f).lower(x).compile().cost_analysis()["flops"]
    for ours, plain in ((ste.round, jnp.round), (ste.sign, jnp.sign)):
        assert flops(ours) == flops(plain)
    # Nothing is kept for the identity; for a window a bool per step, and a zero.
    assert kept(lambda x: 2 * ste.round(x), x) <= 64
    for f in (ste.sign, lambda x: ste.fake_quantize(x, 0.1), lambda x: ste.lsq(x, 0.1)):
        assert kept(f, x) <= STEPS * 1000 + x.nbytes + 64


# ---------------------------------------------------------------- errors


class TestErrors:
    def test_not_floats(self):
        for f in TO_LEAVES.values():
            for x in (jnp.arange(3), 3, True, "x"):
                with pytest.raises(
                    RuleError, match=r"`ste.* not an array of floats.\n  `x` is"
                ):
                    f(x)
            with pytest.raises(
                RuleError, match=r"complex numbers.*\n  at x\['z'\]: it is comp"
            ):
                f({"z": 1j, "x": 1.0})
            with pytest.raises(RuleError, match=r"complex numbers.*\n  `x` is complex64\[\]"):
                f(jnp.array(1j, "complex64"))
        for f in (ste.absmax_scale, ste.dorefa, ste.one_hot_argmax):
            with pytest.raises(RuleError, match=r"not an array of floats.\n  `x` is int"):
                f(jnp.arange(3))
        with pytest.raises(RuleError, match=r"`ste.reinmax` was .*\n  `logits` is int"):
            ste.reinmax(jnp.arange(3), key=jr.key(0))

    def test_wrap(self):
        with pytest.raises(
            RuleError, match=r"is 'tanh'\nGive it a function, or one of .identity"
        ):
            ste.wrap(jnp.sign, backward="tanh")

        @ste.wrap
        def to_grid(x, step):
            return jnp.round(x / step) * step

        with pytest.raises(
            RuleError, match=r"`to_grid` is straight-through(?s:.)*at args\[0\]"
        ):
            jax.grad(to_grid, 1)(1.0, 0.5)
        with pytest.raises(RuleError, match=r"`to_grid` is straight.*\n  at kwargs\['step'\]"):
            jax.grad(lambda step: to_grid(1.0, step=step))(0.5)
        adder = ste.wrap(eqx.Partial(jnp.add, jnp.array(7.0)))
        with pytest.raises(RuleError, match=r"other than its first arg.*\n  at fn.args\[0\]"):
            eqx.filter_grad(lambda f: f(2.0))(adder)
        gain = lambda x, g: ste.wrap(lambda x: g * jnp.round(x))(x)
        assert jax.jit(jax.grad(gain))(1.0, 2.0) == 1.0
        with pytest.raises(
            RuleError, match=r"a function among its arguments closes over.\n  at `g`"
        ):
            jax.grad(gain, 1)(1.0, 2.0)

    def test_wrapped_outputs(self):
        for fn, shown in (
            (lambda x: x[None], r"f32\[1\]|float32\[1\]|float64\[1\]"),
            (lambda x: (x, x), r"\("),
            (lambda x: x.astype(int), "int"),
        ):
            with pytest.raises(
                RuleError,
                match=rf"its `backward` do not fit(?s:.)*is .*({shown})(?s:.)*the argument",
            ):
                jax.grad(lambda x, fn=fn: jnp.sum(jax.tree.leaves(ste.wrap(fn)(x))[0] * 1.0))(
                    1.0
                )
        with pytest.raises(RuleError, match=r"the value of `sum` is float.*\[\]"):
            jax.grad(lambda x: ste.wrap(jnp.sign, backward=jnp.sum)(x).sum())(jnp.ones(2))

    def test_parameters(self):
        x = jnp.ones((2, 3))
        for f, what in (
            (lambda p: ste.fake_quantize(x, p), "scale of `ste.fake_quantize`"),
            (lambda p: ste.fake_quantize(x, 1.0, p), "zero point of `ste.fake_quantize`"),
            (lambda p: ste.lsq(x, p), "step of `ste.lsq`"),
            (lambda p: ste.pact(x, p), "alpha of `ste.pact`"),
            (lambda p: ste.clip(x, p), "min of `ste.clip`"),
            (lambda p: ste.ternary(x, threshold=p), "threshold of `ste.ternary`"),
            (
                lambda p: ste.gumbel_softmax(x, key=jr.key(0), temperature=p),
                "temperature of `ste.gumbel_softmax`",
            ),
        ):
            for wrong in (jnp.ones((3, 2)), jnp.ones((1, 2, 3))):
                with pytest.raises(RuleError, match=f"{what} does not broadcast to the array"):
                    f(wrong)
            with pytest.raises(RuleError, match=f"{what} (is not a number|does not broadcast)"):
                f(jnp.ones(3, "complex64"))
        for f, what in (
            (lambda: ste.fake_quantize(x, 0.0), "scale of `ste.fake_quantize`"),
            (lambda: ste.lsq(x, -1.0), "step of `ste.lsq`"),
            (lambda: ste.pact(x, -1.0), "alpha of `ste.pact`"),
            (lambda: ste.one_hot_argmax(x, temperature=0), "temperature of `ste.one_hot_argm"),
            (lambda: ste.reinmax(x, key=jr.key(0), temperature=0.0), "of `ste.reinmax`"),
        ):
            with pytest.raises(RuleError, match=f"{what}.* is not positive.\n  it is"):
                f()

    def test_constants(self):
        for f, what in (
            (lambda p: ste.ternary(1.0, threshold=p), "The threshold of `ste.ternary`"),
            (lambda p: ste.heaviside(1.0, at_zero=p), "The value at zero of `ste.heaviside`"),
            (
                lambda p: ste.reinmax(jnp.ones(2), key=jr.key(0), temperature=p)[0],
                "The temperature of `ste.reinmax`",
            ),
        ):
            with pytest.raises(RuleError, match=f"{what} was differentiated, and must not be"):
                jax.grad(f)(0.5)
            assert jnp.isfinite(jax.jit(f)(0.5))
        with pytest.raises(RuleError, match=r"got an unknown `threshold`.\n  it is 'median'"):
            ste.ternary(1.0, threshold="median")

    def test_bits_and_modes(self):
        for f in (ste.absmax_scale, ste.dorefa, lambda x, bits: ste.lsq(x, 1.0, bits=bits)):
            for wrong in (0, 25):
                with pytest.raises(
                    RuleError, match=rf"number of bits\.\n  `bits` is {wrong}, "
                ):
                    f(jnp.ones(2), bits=wrong)
        with pytest.raises(RuleError, match=r"an integer from 2 to 24(?s:.)*binary_sign"):
            ste.fake_quantize(1.0, 1.0, bits=1)
        assert ste.fake_quantize(1.0, 1.0, bits=1, signed=False) == 1.0
        with pytest.raises(RuleError, match=r"got an unknown `mode`.\n  it is 'biases'"):
            ste.dorefa(1.0, mode="biases")

    def test_codebooks(self):
        for z, codebook in (((3,), (4, 2)), ((), (4, 2)), ((2,), (2,)), ((2,), (0, 2))):
            with pytest.raises(RuleError, match=r"that does not fit `z`.\n  `z` is fl"):
                ste.vector_quantize(jnp.ones(z), jnp.ones(codebook))
        with pytest.raises(
            RuleError, match=r"needs as many `levels`(?s:.)*`levels` is \(5, 5\)"
        ):
            ste.fsq(jnp.ones(3), (5, 5))
        for wrong in ((), (1,), (5, 0), (2**16, 2**16), (2.5, 3.0)):
            with pytest.raises(RuleError, match=r"`ste.fsq_codebook` can't quantize to"):
                inspect.unwrap(ste.fsq_codebook)(wrong)


# ---------------------------------------------------------------- a network of bits


@pytest.mark.slow
def test_a_network_of_bits_learns_and_only_straight_through(tmp_path):
    """Medians of three seeds, on digits that were not trained with."""
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(root / "examples" / "binary_network.py"), "--out", str(tmp_path)],
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["straight-through"] >= 0.965
    assert result["plain sign"] <= 0.3  # guessing: 0.1
    assert result["two bits"] >= 0.975
    assert (tmp_path / "binary-network.png").read_bytes().startswith(b"\x89PNG")


NAN = float("nan")


@pytest.mark.parametrize(
    "fn",
    [
        ste.one_hot_argmax,
        lambda x: ste.reinmax(x, key=jr.key(0)),
        lambda x: ste.gumbel_softmax(x, hard=True, key=jr.key(0)),
        lambda x: ste.vector_quantize(x, jnp.eye(3))[0],
    ],
)
def test_an_index_does_not_hide_nan(fn):
    """In the row that has it, and in no other."""
    out = fn(jnp.array([[0.1, NAN, 0.3], [0.3, 0.2, 0.1]]))
    assert jnp.isnan(out[0]).all()
    assert not jnp.isnan(out[1]).any()


def test_nan_in_a_codebook_is_not_hidden():
    codebook = jnp.eye(3).at[2, 1].set(NAN)
    assert jnp.isnan(ste.vector_quantize(jnp.ones((2, 3)), codebook)[0]).all()
