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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_and_far_away(dtype):
    x = jnp.array([-6e4, -1, -0.3, 0, 0.7, 6e4, np.inf, np.nan], dtype)
    for f in (ste.sign, ste.binary_sign, ste.heaviside, ste.ternary, ste.hard_tanh):
        assert f(x).dtype == dtype
    for slope_of in (ste.hard_tanh, ste.approx_sign, ste.swish_sign):
        sign = eqg.with_gradient_of(jnp.sign, slope_of)
        np.testing.assert_array_equal(sign(x).astype(float), jnp.sign(x).astype(float))
        first, second = jax.vmap(lambda x, f=sign: (jax.grad(f)(x), jax.grad(jax.grad(f))(x)))(
            x
        )
        assert first.dtype == dtype
        for found in (first, second):
            np.testing.assert_array_equal(found[jnp.array([0, 5, 6])].astype(float), 0)


def test_ends_of_the_window():
    """A weight clipped to one can return."""
    x = jnp.array([-1.0, 1.0])
    for f in (ste.sign, ste.binary_sign, ste.ternary, ste.hard_tanh):
        assert jnp.array_equal(jax.grad(lambda x, f=f: f(x).sum())(x), jnp.ones(2))


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


# ---------------------------------------------------------------- quantizers

GRIDS = {
    "fake_quantize": lambda x: ste.fake_quantize(x, 0.11, bits=4),
    "fake_quantize, unsigned": lambda x: ste.fake_quantize(
        x, 0.07, zero_point=5, bits=4, signed=False
    ),
    "lsq": lambda x: ste.lsq(x, 0.11, bits=4),
}


HALF = [("fake_quantize", "bfloat16"), ("fake_quantize", "float16"), ("lsq", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in GRIDS), *HALF])
def test_sixteen_levels_are_sixteen_values(name, dtype):
    x = jnp.linspace(-2, 2, 4001).astype(dtype)
    f = GRIDS[name]
    for wrap in (lambda f: f, jax.jit):
        out, t_out = wrap(lambda x: jax.jvp(f, (x,), (x,)))(x)
        assert out.dtype == t_out.dtype == dtype
        assert len(np.unique(np.asarray(out, float))) == 16
        assert np.array_equal(bits(wrap(f)(x)), bits(out))


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
    out = ste.fake_quantize(x, 0.25, zero_point=2, bits=2, signed=False)
    np.testing.assert_array_equal(out, [-0.5, -0.5, -0.25, 0, 0, 0.25, 0.25, np.nan])
    out = ste.lsq(x, 0.25, bits=3)
    np.testing.assert_array_equal(out, [-1, -1, -0.25, 0, 0, 0.75, 0.75, np.nan])
    once = ste.fake_quantize(jnp.linspace(-1, 1, 999), 0.037, bits=5)
    assert jnp.array_equal(ste.fake_quantize(once, 0.037, bits=5), once)


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


def test_absmax_scale_of_nothing_and_in_half_precision():
    assert ste.absmax_scale(jnp.zeros(0)) > 0
    assert ste.absmax_scale(jnp.zeros((2, 3)), axis=(0, 1)).shape == (1, 1)
    for dtype in ("float16", "bfloat16"):
        assert ste.absmax_scale(jnp.ones(3, dtype)).dtype == dtype


def test_infinities_do_not_spoil_what_is_shared():
    x = jnp.array([-np.inf, 0.3, np.inf])
    for f in (
        lambda s: ste.fake_quantize(x, s, bits=3).sum(),
        lambda s: ste.lsq(x, s, bits=3).sum(),
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


@pytest.mark.thorough
def test_fsq_in_half_precision_and_far_away(getkey):
    levels, z = (8, 5, 2), jr.normal(getkey(), (5, 3), "float32")
    for dtype in ("float16", "bfloat16"):
        codes, index = ste.fsq(z.astype(dtype), levels)
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


@pytest.mark.thorough
def test_samples_keep_half_precision(getkey):
    for dtype in ("float16", "bfloat16"):
        x = jnp.array([0.1, 0.5, 0.3], dtype)
        for f in (ste.gumbel_softmax, ste.gumbel_sigmoid, ste.bernoulli, ste.reinmax):
            sample = lambda x, f=f: f(x, key=jr.key(0))
            assert sample(x).dtype == jax.grad(lambda x, s=sample: s(x).sum())(x).dtype == dtype


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

Y, COMPLEX = np.ones((2, 3), "float32"), np.ones((), "complex64")
sampled = lambda f, *a, **o: f(*a, key=jr.key(0), **o)
# A parameter that has to broadcast, and to be positive or not.
PARAMETERS = {
    "scale of `ste.fake_quantize`": (lambda p: ste.fake_quantize(Y, p), True),
    "zero point of `ste.fake_quantize`": (
        lambda p: ste.fake_quantize(Y, 1.0, zero_point=p),
        False,
    ),
    "step of `ste.lsq`": (lambda p: ste.lsq(Y, p), True),
    "min of `ste.clip`": (lambda p: ste.clip(Y, p), False),
    "threshold of `ste.ternary`": (lambda p: ste.ternary(Y, threshold=p), False),
    "temperature of `ste.one_hot_argmax`": (
        lambda p: ste.one_hot_argmax(Y, temperature=p),
        True,
    ),
    "temperature of `ste.reinmax`": (lambda p: sampled(ste.reinmax, Y, temperature=p), True),
}


@pytest.mark.parametrize("what", PARAMETERS)
def test_parameters(what):
    f, is_positive = PARAMETERS[what]
    for wrong in (jnp.ones((3, 2)), jnp.ones((1, 2, 3))):
        with pytest.raises(RuleError, match=f"{what} does not broadcast to the array"):
            f(wrong)
    with pytest.raises(RuleError, match=f"{what} (is not a number|does not broadcast)"):
        f(jnp.ones(3, "complex64"))
    if is_positive:
        with pytest.raises(RuleError, match=f"{what} is not positive.\n  it is"):
            f(0.0)


@pytest.mark.parametrize("name", TO_LEAVES)
def test_not_floats(name):
    f = TO_LEAVES[name]
    for x in (jnp.arange(3), 3, True, "x"):
        with pytest.raises(RuleError, match=r"`ste.* not an array of floats.\n  `x` is"):
            f(x)
    with pytest.raises(RuleError, match=r"complex numbers.*\n  at x\['z'\]: it is comp"):
        f({"z": 1j, "x": 1.0})
    with pytest.raises(RuleError, match=r"complex numbers.*\n  `x` is complex64\[\]"):
        f(jnp.asarray(COMPLEX))


CONSTANTS = {
    "threshold of `ste.ternary`": lambda p: ste.ternary(1.0, threshold=p),
    "value at zero of `ste.heaviside`": lambda p: ste.heaviside(1.0, at_zero=p),
    "temperature of `ste.reinmax`": lambda p: sampled(ste.reinmax, Y, temperature=p)[0, 0],
}


@pytest.mark.parametrize("what", CONSTANTS)
def test_constants(what):
    f = CONSTANTS[what]
    with pytest.raises(RuleError, match=f"The {what} was differentiated, and must not be"):
        jax.grad(f)(0.5)
    assert jnp.isfinite(jax.jit(f)(0.5))


OTHER_ERRORS = [
    (lambda: ste.absmax_scale(jnp.arange(3)), r"not an array of floats.\n  `x` is int"),
    (lambda: sampled(ste.reinmax, jnp.arange(3)), r"`ste.reinmax` was .*\n  `logits` is int"),
    (lambda: ste.ternary(1.0, threshold="median"), r"unknown `threshold`.\n  it is 'median'"),
    (lambda: ste.absmax_scale(Y, bits=25), r"number of bits\.\n  `bits` is 25, "),
    (lambda: ste.lsq(Y, 1.0, bits=0), r"number of bits\.\n  `bits` is 0, "),
    (lambda: ste.fake_quantize(1.0, 1.0, bits=1), r"from 2 to 24(?s:.)*binary_sign"),
    (lambda: ste.fsq(jnp.ones(3), (5, 5)), r"as many `levels`(?s:.)*`levels` is \(5, 5\)"),
    *[
        (lambda z=z, c=c: ste.vector_quantize(jnp.ones(z), jnp.ones(c)), r"does not fit `z`")
        for z, c in (((3,), (4, 2)), ((), (4, 2)), ((2,), (2,)), ((2,), (0, 2)))
    ],
    *[
        (lambda x=x: inspect.unwrap(ste.fsq_codebook)(x), r"`ste.fsq_codebook` can't quantize")
        for x in ((), (1,), (5, 0), (2**16, 2**16), (2.5, 3.0))
    ],
]


@pytest.mark.parametrize(("call", "match"), OTHER_ERRORS)
def test_other_errors(call, match):
    with pytest.raises(RuleError, match=match):
        call()


def test_the_number_of_bits_is_a_keyword():
    """`fake_quantize(x, scale, 8)` would be a zero point of 8."""
    with pytest.raises(TypeError, match="positional"):
        ste.fake_quantize(1.0, 0.1, 8)
    assert ste.fake_quantize(1.0, 1.0, bits=1, signed=False) == 1.0


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
