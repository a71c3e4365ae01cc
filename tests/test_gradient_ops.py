"""Identities with a derivative of their own, against NumPy, Optax and published formulas."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import optax
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


pytestmark = pytest.mark.x64


MASK = np.array([True, False, True, True])

# Each op, and what it makes of a gradient of shape (4,), in NumPy.
OPS = {
    "scale": (lambda x: eqg.scale_gradient(x, 0.5), lambda g: 0.5 * g),
    "reverse": (lambda x: eqg.reverse_gradient(x, 2.0), lambda g: -2 * g),
    "mask": (lambda x: eqg.mask_gradient(x, MASK), lambda g: np.where(MASK, g, 0)),
    "clip": (lambda x: eqg.clip_gradient(x, -0.2, 0.1), lambda g: np.clip(g, -0.2, 0.1)),
    "clip norm": (
        lambda x: eqg.clip_gradient_norm(x, 0.3),
        lambda g: g * min(1, 0.3 / np.linalg.norm(g)),
    ),
    "normalize": (lambda x: eqg.normalize_gradient(x), lambda g: g / np.linalg.norm(g)),
    "zero nonfinite": (
        lambda x: eqg.zero_nonfinite_gradient(x),
        lambda g: np.where(np.isfinite(g), g, 0),
    ),
    "cast": (
        lambda x: eqg.cast_gradient(x, jnp.bfloat16),
        lambda g: g.astype(ml_dtypes.bfloat16).astype(g.dtype),
    ),
    "on_backward": (lambda x: eqg.on_backward(x, lambda g: g**3), lambda g: g**3),
}
# What is linear is so in forward mode too; the others are the identity there.
IDENTITIES = {
    **{name: op for name, (op, _) in OPS.items()},
    "noise": lambda x: eqg.noise_gradient(x, key=jr.key(0), stddev=0.1),
    "probe": lambda x: eqg.probe(x, eqg.GradientStatistics()),
    "tap": lambda x: eqg.tap_gradient(x, print),
    "watch": lambda x: eqg.watch_gradient(x, "x"),
}
WEIGHT = np.array([0.5, -3.0, 0.25, 1.0], np.float32)
X = np.array([0.5, -1.0, 2.0, 0.1], np.float32)


def loss(op, x):
    return jnp.sum(jnp.sin(op(jnp.asarray(WEIGHT, x.dtype) * x)))


def bits(x):
    return np.asarray(x).tobytes()


class TestForward:
    @pytest.mark.cost
    @pytest.mark.parametrize("name", IDENTITIES)
    def test_adds_nothing_to_the_compiled_program(self, name):
        """Instruction for instruction, it is the program without the op."""

        def instructions(op):
            scan = lambda x: jax.lax.scan(lambda h, _: (jnp.sin(op(h)), None), x, None, 3)[0]
            compiled = jax.jit(scan).lower(jnp.asarray(X)).compile()
            lines = compiled.as_text().splitlines()
            kinds = sorted(line.split("(")[0].split()[-1] for line in lines if " = " in line)
            return [k.rsplit(".", 1)[0] for k in kinds], compiled.cost_analysis()["flops"]

        assert instructions(IDENTITIES[name]) == instructions(lambda x: x)

    @pytest.mark.parametrize("name", IDENTITIES)
    def test_all_other_leaves_pass(self, name):
        op = IDENTITIES[name]
        if name == "mask":
            op = lambda x: eqg.mask_gradient(x, True)
        elif name == "on_backward":
            op = lambda x: eqg.on_backward(x, lambda g: jax.tree.map(lambda g: 2 * g, g))
        tree = {
            "x": jnp.asarray(X),
            "count": jnp.array(3),
            "flag": True,
            "number": 7,
            "name": "layer",
            "fn": jnp.tanh,
            "key": jr.key(0),
            "nothing": None,
            "empty": jnp.zeros((0, 2)),
        }
        out = op(tree)
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        for key in ("flag", "number", "name", "fn"):
            assert out[key] is tree[key]
        assert out["count"].dtype == jnp.array(3).dtype
        sine = lambda t: jnp.sum(jnp.sin(op(t)["x"]))
        grads = eqx.filter_jit(eqx.filter_grad(sine))(tree)
        assert grads["x"].shape == (4,)
        assert not jnp.any(jnp.isnan(grads["x"]))
        assert grads["name"] is grads["count"] is grads["nothing"] is None


def hidden(op, x):
    """The carry of a scan."""
    step = lambda h, _: (jnp.tanh(jnp.asarray(WEIGHT, x.dtype) * op(h)), None)
    return jax.lax.scan(step, x, None, length=3)[0]


def hidden_gradient(ref, x):
    """Backpropagation through time by hand."""
    hs = [x]
    for _ in range(3):
        hs.append(np.tanh(WEIGHT * hs[-1]))
    g = np.cos(hs[-1])
    for h in reversed(hs[1:]):
        g = ref(WEIGHT * (1 - h**2) * g)
    return g


# One compilation for many programs: most of the time goes there.
def compiled(programs, x):
    return jax.jit(lambda x: [program(x) for program in programs])(x)


@pytest.mark.parametrize("name", OPS)
class TestBackward:
    def test_on_a_scan_carry_it_acts_at_every_step(self, name):
        op, ref = OPS[name]
        of_hidden = lambda x: jnp.sum(jnp.sin(hidden(op, x)))
        programs = [jax.grad(of_hidden), jax.grad(jax.checkpoint(of_hidden))]
        for grad in compiled(programs, jnp.asarray(X)):
            assert_close(grad, jnp.asarray(hidden_gradient(ref, X)))


# Ganin et al. (2016), section 5.2.2: 2 / (1 + exp(-10 p)) - 1, with ten digits of a desk
# calculator.


def gradient_of(op, ct):
    """What `op` makes of this cotangent."""
    x = jax.tree.map(jnp.zeros_like, ct)
    return jax.vjp(op, x)[1](ct)[0]


class TestNorms:
    def test_as_optax(self, getkey):
        ct = {"a": jr.normal(getkey(), (5, 3)), "b": [jr.normal(getkey(), (7,))]}
        traced = jax.jit(lambda m: gradient_of(lambda x: eqg.clip_gradient_norm(x, m), ct))
        for max_norm in (0.5, 3.0, 100.0):
            want, _ = optax.clip_by_global_norm(max_norm).update(ct, optax.EmptyState())
            assert_close(traced(max_norm), want)

    def test_short_enough_is_passed_on_to_the_bit(self, getkey):
        ct = jr.normal(getkey(), (50,), jnp.float32)
        out = gradient_of(lambda x: eqg.clip_gradient_norm(x, 50.0), ct)
        assert bits(out) == bits(ct)

    def test_one_norm_for_what_is_not_batched(self, getkey):
        """A weight that all examples share gets one gradient, which is clipped once."""
        weight, xs = jr.normal(getkey(), (3,)), jr.normal(getkey(), (8, 3))

        def loss(weight):
            f = lambda w, x: jnp.vdot(eqg.clip_gradient_norm(w, 1.0), x)
            return jnp.sum(jax.vmap(f, (None, 0))(weight, xs))

        total = np.sum(xs, 0)
        assert_close(jax.jit(jax.grad(loss))(weight), jnp.asarray(clip_rows(total[None])[0]))
        per_example = jax.vmap(
            jax.grad(lambda w, x: jnp.vdot(eqg.clip_gradient_norm(w, 1.0), x)), (None, 0)
        )
        assert_close(jax.jit(per_example)(weight, xs), clip_rows(np.asarray(xs)))


def clip_rows(x):
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.asarray(x * np.minimum(1, 1 / norms))


class TestNoise:
    def test_statistics_over_many_keys(self, getkey):
        """Mean, variance and fourth moment of the normal distribution; no correlation."""
        ct = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
        op = lambda x, key: eqg.noise_gradient(x, key=key, stddev=0.3)
        noisy = jax.vmap(lambda key: gradient_of(ft.partial(op, key=key), ct))
        n = 20_000
        out = noisy(jr.split(getkey(), n))
        noise = (np.column_stack([out["a"], out["b"]]) - [1.0, -2.0, 0.5]) / 0.3
        five_sigma = 5 / np.sqrt(n)
        assert np.all(np.abs(noise.mean(0)) < five_sigma)
        assert np.all(np.abs(np.mean(noise**2, 0) - 1) < five_sigma * np.sqrt(2))
        assert np.all(np.abs(np.mean(noise**4, 0) - 3) < five_sigma * np.sqrt(96))
        assert np.all(np.abs(np.cov(noise.T) - np.eye(3)) < five_sigma * np.sqrt(2))


FORMATS = ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3b11fnuz"]


class TestCast:
    @pytest.mark.parametrize("name", FORMATS)
    def test_as_ml_dtypes(self, name):
        """Every exponent, subnormal numbers, halfway cases and overflow; also compiled, where
        XLA would drop a pair of casts."""
        rng = np.random.default_rng(0)
        finfo = ml_dtypes.finfo(name)
        values = rng.uniform(-2, 2, 4000) * 2.0 ** rng.integers(-30, 20, 4000)
        edge = float(finfo.smallest_normal) * np.linspace(-2, 2, 65)
        top = float(finfo.max) * np.array([0.99, 1.0, 1.02, 1.04, 1.1])
        top = top[np.abs(top) < 3e38]
        ct = np.concatenate([values, edge, top, -top, [0.0, np.inf, np.nan]]).astype("float32")
        with np.errstate(all="ignore"):
            want = ct.astype(name).astype("float32")
        cast = lambda ct: gradient_of(lambda x: eqg.cast_gradient(x, name), ct)
        for f in (cast, jax.jit(cast)):
            np.testing.assert_array_equal(f(jnp.asarray(ct)), want)

    def test_higher_orders_take_it_as_the_identity(self):
        f = lambda x: eqg.cast_gradient(x, jnp.float8_e5m2) ** 3
        assert jax.jit(jax.hessian(f))(1.0) == 6.0


class TestOneWay:
    def test_fn_may_hold_anything(self):
        """A Module, and what is being differentiated: the value does not depend on it."""

        class Scale(eqx.Module):
            factor: jax.Array

            def __call__(self, g):
                return self.factor * g

        def loss(x, scale):
            by_closure = eqg.on_backward(x, lambda g: x * g)
            return eqg.on_backward(by_closure, scale) ** 2

        args = (3.0, Scale(jnp.array(5.0)))
        for grad in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
            g_x, g_scale = grad(*args)
            assert g_x == 3 * 5 * 6
            assert g_scale.factor == 0
        of_gradient = lambda scale: jax.grad(loss)(3.0, scale)
        assert jax.grad(of_gradient)(args[1]).factor == 18.0

    def test_a_tree_is_handed_over_whole(self):
        seen = []

        def fn(g):
            seen.append(g)
            return {"a": g["b"], "b": g["a"], "n": None}

        f = lambda x: 2.0 * eqg.on_backward(x, fn)["a"]
        grads = jax.grad(f, allow_int=True)({"a": 1.0, "b": 5.0, "n": 3})
        assert (grads["a"], grads["b"]) == (0.0, 2.0)
        assert seen[0]["n"] is None
        assert seen[0]["b"] == 0.0  # nothing depends on it


# ---------------------------------------------------------------- recurrent networks


# ---------------------------------------------------------------- errors


X3 = {"w": np.zeros((2, 3), np.float32)}
NOISE = {"key": jr.key(0)}
scalar = lambda fn: jax.grad(lambda x: eqg.on_backward(x, fn))(1.0)
# A call, and what the error says. More are in `guard/test_errors.py`.
WRONG = [
    (lambda: eqg.scale_gradient(X3, np.ones(2)), r"`s` of `scale_gradient` does not broadcast"
        r" to `x`.\n  `s` is float64\[2\], x\['w'\] is float32\[2,3\]\n.*broadcast"),
    (lambda: eqg.clip_gradient(X3, float("nan"), 1.0), r"a `min` that exceeds `max`"),
    (lambda: eqg.clip_gradient_norm(X3, float("nan")), r"is not positive or zero"),
    (lambda: eqg.normalize_gradient(X3, eps=-1e-3), r"`eps` .* is not positive or zero"),
    (lambda: eqg.noise_gradient(X3, **NOISE, stddev=-1.0), r"`stddev` .* is not positive or z"),
    (lambda: eqg.noise_gradient(X3, **NOISE, stddev=np.ones(2)),
        r"The `stddev` of `noise_gradient` does not broadcast to `x`"),
    (lambda: eqg.cast_gradient(X3, jnp.int8), r"that is not floating.\n  `dtype` is int8"),
    (lambda: eqg.cast_gradient(X3, "float7"), r"that is not floating.\n  `dtype` is float7"),
    (lambda: scalar(lambda g: 1j * g), r"is float32\[\], the result is complex64\[\]"),
]  # fmt: skip


def _float32(pattern):
    """The default precision is double with JAX_ENABLE_X64."""
    if not jax.config.read("jax_enable_x64"):
        return pattern
    return pattern.replace(r"with float32\[\]", r"with float64\[\]").replace(
        r"complex64\[\]", r"complex128\[\]"
    )


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_errors(call, message):
    with pytest.raises(RuleError, match=_float32(message)):
        call()
