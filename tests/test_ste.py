"""Straight-through: values to the bit, gradients against plain autodiff and the papers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import ste


pytestmark = pytest.mark.x64


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.itemsize}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_to_the_bit(dtype):
    edges = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -0.3, 0.7, 1e-30, 3e4, np.inf, -np.inf, np.nan]
    x, ct = jnp.array(edges, dtype), jnp.array(edges[::-1], dtype)
    for name in ("round", "floor", "ceil", "trunc"):
        ours, theirs = getattr(ste, name), getattr(jnp, name)
        assert np.array_equal(bits(ours(x)), bits(theirs(x)))
        assert np.array_equal(bits(jax.vjp(ours, x)[1](ct)[0]), bits(ct))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    x, key = jnp.array([-6e4, -1, -0.3, 0, 0.7, 6e4, np.inf], dtype), jr.key(0)
    for f in (ste.sign, ste.binary_sign, ste.heaviside, ste.ternary, ste.swish_sign):
        assert f(x).dtype == dtype
    p = jnp.array([0.1, 0.5, 0.3], dtype)
    for f in (ste.gumbel_softmax, ste.gumbel_sigmoid, ste.bernoulli, ste.reinmax):
        assert jax.grad(lambda p, f=f: f(p, key=key).sum())(p).dtype == dtype
    codes, index = ste.fsq(p, (8, 5, 2))
    assert np.array_equal(bits(codes), bits(ste.fsq_codebook((8, 5, 2), dtype)[index]))
    # Rounded down, a scale of eight bits in the mantissa is too small for twelve.
    x = jnp.linspace(1.0, 2.0, 9).astype(dtype)
    quantize = lambda x: ste.fake_quantize(x, ste.absmax_scale(x, bits=12), bits=12)
    assert jnp.array_equal(jax.vmap(jax.grad(quantize))(x), jnp.ones(9, dtype))
    # Sixteen levels are sixteen values, in both modes.
    x = jnp.linspace(-2, 2, 4001).astype(dtype)
    for f in (ste.fake_quantize, ste.lsq):
        out, t_out = jax.jit(lambda x, f=f: jax.jvp(lambda x: f(x, 0.11, bits=4), (x,), (x,)))(
            x
        )
        assert out.dtype == t_out.dtype == dtype
        assert len(np.unique(np.asarray(out, float))) == 16


def test_a_scale_is_rounded_up():
    """Or else it would clip the largest element."""
    largest = jnp.linspace(1.0, 2.0, 9).astype("bfloat16")
    assert all(float(ste.absmax_scale(x, bits=12)) * 2047 >= float(x) for x in largest)


@pytest.mark.parametrize("f", [ste.round, ste.ternary, lambda x: ste.clip(x, -0.5, 0.5)])
def test_trees(f, getkey):
    linear, key = eqx.nn.Linear(2, 3, use_bias=False, key=getkey()), getkey()
    tree = (linear, {"n": jnp.arange(3), "b": True, "k": key, "f": jnp.sin, "x": 0.7}, None)
    out = f(tree)
    assert jnp.array_equal(out[0].weight, f(linear.weight))
    assert (out[1]["x"].dtype, out[1]["x"]) == (jnp.asarray(0.7).dtype, f(0.7))
    for kept in ("n", "b", "k", "f"):
        assert out[1][kept] is tree[1][kept]
    assert f(np.float32(0.7)).dtype == "float32"
    assert jax.grad(f)(0.3) == jax.grad(f)(np.float32(0.3)) == 1.0


def test_top_k_beside_a_mask():
    """Elements at the lowest number have no part in the derivative."""
    of = lambda x: jax.jacobian(lambda x: ste.top_k(x, 2))(jnp.array(x, "float32"))
    x = [1.0, 2.0, 0.5, float(jnp.finfo("float32").min)]
    np.testing.assert_allclose(of(x)[:3, :3], of(x[:3]), rtol=1e-6)


def test_a_learned_step_has_no_second_derivative():
    """Nor where the number is at an end of the range."""
    assert jax.hessian(lambda step: ste.lsq(0.5, step, bits=2))(0.5) == 0


# Recorded in double precision from the code of the paper's authors (arXiv 2309.15505, appendix
# A.1; the Colab `fsq/fsq.ipynb` of google-research/google-research). The first row is that of
# the Colab. Some inputs are close to a border between two levels.
FSQ_OF_THE_AUTHORS = {
    "z": [[0.25, 0.6, -7], [-1.3, 0.3, 0.9], [0.549, 1.9, 0.0], [0.551, -1.2, 0.2]],
    "codes": [[0.0, 0.5, -1.0], [-1.0, 0.5, 0.5], [0.0, 1.0, 0.0], [1.0, -1.0, 0.0]],
    "indices": [10, 54, 43, 32],
    "gradient": [
        [0.9390748339575716, 0.7108661848246354, 4.984701623911292e-06],
        [0.25717576350639115, 0.9142218248648027, 0.21130582192635694],
        [0.7494793610686304, 0.08552431374972705, 0.6659761677912085],
        [0.7479803442479293, 0.3047149762112016, 0.5634418463904769],
    ],
}


def test_fsq_is_that_of_the_paper():
    levels, want = (3, 5, 4), FSQ_OF_THE_AUTHORS
    with jax.enable_x64(True):
        z = jnp.array(want["z"], jnp.float64)
        codes, indices = ste.fsq(z, levels)
        np.testing.assert_allclose(codes, want["codes"], rtol=1e-15)
        np.testing.assert_array_equal(indices, want["indices"])
        gradient = jax.grad(lambda z: jnp.sum(ste.fsq(z, levels)[0]))(z)
        np.testing.assert_allclose(gradient, want["gradient"], rtol=1e-9)


@pytest.mark.slow
def test_samples_are_distributed_as_they_should(getkey):
    n, logits = 300_000, jnp.array([0.3, -1.0, 1.5, 0.0, -np.inf])
    p = jnp.array([0.0, 0.1, 0.5, 0.93, 1.0])
    rows = lambda x: jnp.broadcast_to(x, (n, 5))
    softmax = jax.nn.softmax(logits)
    for samples, p_ in (
        (ste.gumbel_softmax(rows(logits), key=getkey(), hard=True), softmax),
        (ste.reinmax(rows(logits), key=getkey()), softmax),
        (ste.bernoulli(rows(p), key=getkey()), p),
        (ste.bernoulli(rows(p).astype("bfloat16"), key=getkey()), p.astype("bfloat16")),
        (ste.gumbel_sigmoid(rows(jnp.log(p / (1 - p))), key=getkey(), hard=True), p),
    ):
        assert set(np.unique(np.asarray(samples, float))) == {0.0, 1.0}
        q = np.asarray(p_, float)
        error = np.asarray(samples, float).mean(0) - q
        assert (np.abs(error) <= 5 * np.sqrt(q * (1 - q) / n)).all()
    key, ct = getkey(), jnp.arange(5.0)
    assert jnp.array_equal(jax.vjp(lambda p: ste.bernoulli(p, key=key), p)[1](ct)[0], ct)


@pytest.mark.cost
def test_cost():
    """Nothing is kept for the identity; for a window a bool per step, and a zero."""
    x, steps = jnp.ones(1000, "float32"), 20

    def kept(f):
        loop = lambda x: jax.lax.scan(lambda x, _: (f(x), None), x, None, steps)[0]
        return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.vjp(loop, x)[1]))

    flops = lambda f: jax.jit(f).lower(x).compile().cost_analysis()["flops"]
    for ours, plain in ((ste.round, jnp.round), (ste.sign, jnp.sign)):
        assert flops(ours) == flops(plain)
    assert kept(lambda x: 2 * ste.round(x)) <= 64
    for f in (ste.sign, lambda x: ste.fake_quantize(x, 0.1), lambda x: ste.lsq(x, 0.1)):
        assert kept(f) <= steps * 1000 + x.nbytes + 64
