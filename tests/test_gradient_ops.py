"""Identities with a derivative of their own, against NumPy, Optax and published formulas."""

import functools as ft
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
import ml_dtypes
import numpy as np
import optax
import pytest
from eqx_grads import RuleError
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close


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
LINEAR = {"scale", "reverse", "mask"}
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


def expected(ref, x):
    return WEIGHT * ref(np.cos(WEIGHT * x))


def bits(x):
    return np.asarray(x).tobytes()


class TestForward:
    @pytest.mark.parametrize("name", IDENTITIES)
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
    def test_the_identity_to_the_bit(self, name, dtype):
        op = IDENTITIES[name]
        values = np.array([-0.0, np.nan, np.inf, 1e-7], dtype)
        x = jnp.asarray(values)
        assert bits(op(x)) == bits(x)
        assert op(x).dtype == dtype
        assert bits(jax.vjp(op, x)[0]) == bits(x)
        assert bits(op(values)) == bits(x)  # a NumPy array

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

    @pytest.mark.parametrize("name", IDENTITIES)
    def test_python_floats(self, name):
        op = IDENTITIES[name]
        if name == "mask":
            op = lambda x: eqg.mask_gradient(x, True)
        assert op(2.0) == 2.0
        assert isinstance(op(2.0), jax.Array)
        grad = jax.grad(lambda x: op(x) ** 2)(2.0)
        assert grad.dtype == jnp.zeros(()).dtype
        assert grad != 0


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
    def test_grad(self, name):
        op, ref = OPS[name]
        of_x = ft.partial(loss, op)
        either = lambda x: jax.lax.cond(x[0] > 0, of_x, jnp.sum, x)
        x, want = jnp.asarray(X), jnp.asarray(expected(ref, X))
        assert_close(jax.grad(of_x)(x), want)
        programs = [of_x, jax.jit(of_x), jax.checkpoint(of_x), either, eqx.filter_jit(of_x)]
        for grad in compiled([jax.grad(f) for f in programs], x):
            assert_close(grad, want)

    def test_vmap(self, name):
        """With every example on its own, in whichever order."""
        op, ref = OPS[name]
        xs = np.stack([X, 2 * X, -X])
        total = lambda xs: jnp.sum(jax.vmap(ft.partial(loss, op))(xs))
        programs = [jax.vmap(jax.grad(ft.partial(loss, op))), jax.grad(total)]
        for grads in compiled(programs, jnp.asarray(xs)):
            assert_close(grads, jnp.asarray(np.stack([expected(ref, x) for x in xs])))

    def test_on_a_scan_carry_it_acts_at_every_step(self, name):
        op, ref = OPS[name]
        of_hidden = lambda x: jnp.sum(jnp.sin(hidden(op, x)))
        programs = [jax.grad(of_hidden), jax.grad(jax.checkpoint(of_hidden))]
        for grad in compiled(programs, jnp.asarray(X)):
            assert_close(grad, jnp.asarray(hidden_gradient(ref, X)))

    def test_forward_mode(self, name):
        op, ref = OPS[name]
        t = jnp.arange(4.0, dtype=jnp.float32)
        want = ref(np.asarray(t)) if name in LINEAR else t
        y, t_y = jax.jvp(op, (jnp.asarray(X),), (t,))
        assert bits(y) == bits(X)
        assert_close(t_y, jnp.asarray(want))
        programs = [
            lambda x: jax.jvp(jax.jit(op), (x,), (t,))[1],
            lambda x: jax.jacfwd(op)(x) @ t,
            lambda x: jax.linearize(op, x)[1](t),
        ]
        for t_y in compiled(programs, jnp.asarray(X)):
            assert_close(t_y, jnp.asarray(want))

    def test_half_precision(self, name):
        op, _ = OPS[name]
        grad = jax.grad(ft.partial(loss, op))
        dtypes = [jnp.float16, jnp.bfloat16]
        at = [lambda x, dtype=dtype: grad(x.astype(dtype)) for dtype in dtypes]
        exact = np.asarray(grad(jnp.asarray(X)))
        for dtype, got in zip(dtypes, compiled(at, jnp.asarray(X)), strict=True):
            assert got.dtype == dtype
            eps = float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(
                np.asarray(got, np.float32), exact, rtol=8 * eps, atol=2 * eps
            )

    def test_second_order_is_the_derivative_of_the_gradient(self, name):
        op, ref = OPS[name]
        grad = jax.grad(ft.partial(loss, op))
        programs = [jax.jacrev(grad), jax.jacfwd(grad)]
        if name == "cast":  # ... which takes the rounding as the identity
            ref = lambda g: g
        want = finite_differences(ft.partial(expected, ref))
        for jacobian in compiled(programs, jnp.asarray(X)):
            np.testing.assert_allclose(jacobian, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["scale", "mask", "clip norm", "on_backward"])
def test_second_order_on_a_scan_carry(name):
    op, ref = OPS[name]
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(hidden(op, x))))
    want = finite_differences(ft.partial(hidden_gradient, ref))
    (jacobian,) = compiled([jax.jacfwd(grad)], jnp.asarray(X))
    np.testing.assert_allclose(jacobian, want, rtol=1e-4, atol=1e-4)


def finite_differences(gradient, step=1e-6):
    """The Jacobian of a NumPy function, in double precision."""
    x = X.astype(np.float64)
    columns = [(gradient(x + h) - gradient(x - h)) / (2 * step) for h in step * np.eye(len(x))]
    return np.stack(columns, axis=1)


class TestScale:
    def test_traced_and_array_factors(self):
        x = jnp.asarray(X)
        for s in (2, jnp.array(2.0), np.float32(2), jnp.full(4, 2.0), jnp.full((1,), 2)):
            op = lambda x, s=s: eqg.scale_gradient(x, s)
            assert_close(jax.grad(ft.partial(loss, op))(x), 2 * jax.grad(total_sin)(x))
        traced = jax.jit(jax.grad(lambda x, s: loss(lambda y: eqg.scale_gradient(y, s), x)))
        assert_close(traced(x, 3.0), 3 * jax.grad(total_sin)(x))
        batched = jax.vmap(traced, (None, 0))(x, jnp.array([0.0, -1.0]))
        assert_close(batched, jnp.stack([0 * x, -jax.grad(total_sin)(x)]))

    def test_the_factor_has_no_first_derivative_and_the_right_second_one(self):
        f = lambda x, s: eqg.scale_gradient(x, s) ** 3
        assert jax.grad(f, (0, 1))(2.0, 5.0) == (60.0, 0.0)
        # d/ds of s * 3 x^2
        assert jax.grad(lambda s: jax.grad(f)(2.0, s))(5.0) == 12.0

    def test_complex(self):
        f = lambda z: jnp.real(eqg.scale_gradient(z, 2j) ** 2)
        plain = jax.grad(lambda z: jnp.real(z**2))(1 + 2j)
        assert_close(jax.grad(f)(1 + 2j), 2j * plain)


def total_sin(x):
    return loss(lambda x: x, x)


# Ganin et al. (2016), section 5.2.2: 2 / (1 + exp(-10 p)) - 1, with ten digits of a desk
# calculator.
SCHEDULE = {
    0.0: 0.0,
    0.01: 0.0499583750,
    0.1: 0.4621171573,
    0.25: 0.8482836400,
    0.5: 0.9866142982,
    1.0: 0.9999092043,
}


class TestReversalSchedule:
    @pytest.mark.parametrize("progress", SCHEDULE)
    def test_published_formula(self, progress):
        want = SCHEDULE[progress]
        assert np.isclose(eqg.reversal_schedule(progress), want, rtol=1e-6, atol=0)
        traced = jax.jit(eqg.reversal_schedule)(jnp.array(progress))
        assert np.isclose(traced, want, rtol=1e-6, atol=0)


class TestClip:
    def test_bounds(self):
        grad = lambda *bounds: jax.grad(
            lambda x: jnp.sum(5 * eqg.clip_gradient(x, *bounds) * jnp.array([1.0, -1.0]))
        )(jnp.zeros(2))
        assert_close(grad(None, 1), jnp.array([1.0, -5.0]))
        assert_close(grad(-1, None), jnp.array([5.0, -1.0]))
        assert_close(grad(None, None), jnp.array([5.0, -5.0]))
        assert_close(grad(np.array([6.0, -1.0]), jnp.array(7)), jnp.array([6.0, -1.0]))
        assert_close(jax.jit(grad)(-2.0, 3.0), jnp.array([3.0, -2.0]))

    def test_special_values(self):
        x = jnp.zeros(4)
        ct = jnp.array([jnp.inf, -jnp.inf, jnp.nan, -0.0])
        (out,) = jax.vjp(lambda x: eqg.clip_gradient(x, -2.0, 2.0), x)[1](ct)
        assert bits(out) == bits(jnp.array([2.0, -2.0, jnp.nan, -0.0]))

    def test_bounds_may_be_learned(self):
        """The value does not depend on them; the gradient of the gradient does."""
        f = lambda x, limit: 3 * eqg.clip_gradient(x, -limit, limit)
        assert jax.grad(f, (0, 1))(1.0, 2.0) == (2.0, 0.0)
        assert jax.grad(lambda limit: jax.grad(f)(1.0, limit))(2.0) == 1.0

    def test_complex(self):
        ct = jnp.array([3 + 0.5j, -4 - 1j])
        pull = jax.vjp(lambda z: eqg.clip_gradient(z, -1.0, 2.0), jnp.zeros(2, complex))[1]
        assert_close(pull(ct)[0], jnp.array([2 + 0.5j, -1 - 1j]))


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

    def test_per_row(self, getkey):
        ct = 3 * jr.normal(getkey(), (4, 3, 2))
        clip = jax.jit(
            lambda axis: gradient_of(lambda x: eqg.clip_gradient_norm(x, 1.0, axis), ct),
            static_argnums=0,
        )
        norms = np.linalg.norm(ct, axis=-1, keepdims=True)
        assert_close(clip(-1), jnp.asarray(ct * np.minimum(1, 1 / norms)))
        norms = np.sqrt(np.sum(np.square(ct), (0, 2), keepdims=True))
        assert_close(clip((0, -1)), jnp.asarray(ct * np.minimum(1, 1 / norms)))
        normalize = ft.partial(gradient_of, lambda x: eqg.normalize_gradient(x, (0, 2)))
        assert_close(jax.jit(normalize)(ct), jnp.asarray(ct / norms))

    @pytest.mark.parametrize("size", [1e-30, 1e30])
    def test_no_square_overflows(self, size):
        ct = np.array([3 * size, 4 * size], np.float32)
        unit = gradient_of(eqg.normalize_gradient, jnp.asarray(ct))
        assert_close(unit, jnp.array([0.6, 0.8], jnp.float32))
        clipped = gradient_of(lambda x: eqg.clip_gradient_norm(x, size), jnp.asarray(ct))
        assert_close(clipped / size, jnp.array([0.6, 0.8], jnp.float32))

    def test_no_sum_overflows_in_half_precision(self):
        ct = jnp.full(100, 3e4, jnp.float16)
        unit = gradient_of(eqg.normalize_gradient, ct)
        assert_close(unit, jnp.full(100, 0.1, jnp.float16))

    def test_zero(self):
        ct = jnp.zeros(3)
        for op in (eqg.normalize_gradient, lambda x: eqg.clip_gradient_norm(x, 0.0)):
            assert_close(gradient_of(op, ct), ct)
            # ... and its derivative, in which nothing is divided by zero either
            (jacobian,) = compiled([jax.jacrev(ft.partial(gradient_of, op))], ct)
            assert jnp.all(jnp.isfinite(jacobian))
        eps = lambda x: eqg.normalize_gradient(x, eps=0.5)
        assert_close(gradient_of(eps, ct), ct)

    def test_not_finite(self):
        ct = jnp.array([1.0, jnp.inf, jnp.nan])
        clipped = gradient_of(lambda x: eqg.clip_gradient_norm(x, 0.1), ct)
        assert bits(clipped) == bits(ct)
        assert jnp.all(jnp.isnan(gradient_of(eqg.normalize_gradient, ct)))
        assert_close(
            gradient_of(lambda x: eqg.zero_nonfinite_gradient(x), ct), jnp.array([1.0, 0, 0])
        )

    def test_eps(self):
        ct = jnp.array([3.0, 4.0])
        assert_close(gradient_of(lambda x: eqg.normalize_gradient(x, eps=5.0), ct), ct / 10)
        small = gradient_of(lambda x: eqg.normalize_gradient(x, eps=1.0), 1e-20 * ct)
        assert_close(1e20 * small, ct)

    def test_complex(self):
        ct = jnp.array([3j, 4.0 + 0j])
        assert_close(gradient_of(eqg.normalize_gradient, ct), ct / 5)

    @pytest.mark.parametrize("length", [0.5, 3.0])
    def test_derivative_of_the_gradient(self, length):
        """That of the projection onto the ball of radius one, and onto the sphere."""
        x = length * jnp.array([2.0, -1.0, 2.0]) / 3
        unit = x / length
        onto_sphere = (jnp.eye(3) - jnp.outer(unit, unit)) / length
        clip = lambda ct: gradient_of(lambda x: eqg.clip_gradient_norm(x, 1.0), ct)
        normalize = ft.partial(gradient_of, eqg.normalize_gradient)
        for jacobian in compiled([jax.jacrev(clip), jax.jacfwd(clip)], x):
            assert_close(jacobian, onto_sphere if length > 1 else jnp.eye(3))
        for jacobian in compiled([jax.jacrev(normalize), jax.jacfwd(normalize)], x):
            assert_close(jacobian, onto_sphere)

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


class TestMask:
    def test_trees_and_prefixes(self):
        x = {"a": (jnp.ones(2), jnp.ones(3)), "b": jnp.ones(()), "c": None, "d": "name"}
        mask = {"a": (True, jnp.array([True, False, True])), "b": False, "c": None, "d": True}
        prefix = {"a": False, "b": np.array(True), "c": None, "d": True}

        def grads(op, mask):
            total = lambda x: sum(
                map(jnp.sum, jax.tree.leaves(eqx.filter(op(x, mask), is_float)))
            )
            return eqx.filter_grad(total)(x)

        is_float = eqx.is_inexact_array
        got = grads(eqg.mask_gradient, mask)
        assert_close(got["a"], (jnp.ones(2), jnp.array([1.0, 0.0, 1.0])))
        assert got["b"] == 0
        got = grads(eqg.mask_gradient, prefix)
        assert_close(got["a"], (jnp.zeros(2), jnp.zeros(3)))
        assert got["b"] == 1
        got = grads(eqg.mask_gradient, jax.tree.map(jnp.logical_not, mask))
        assert_close(got["a"], (jnp.zeros(2), jnp.array([0.0, 1.0, 0.0])))
        assert got["b"] == 1

    def test_freezes_a_part_of_a_model(self, getkey):
        mlp = eqx.nn.MLP(2, 3, 4, 1, key=getkey())
        mask = jax.tree.map(lambda _: False, mlp)
        mask = eqx.tree_at(lambda m: m.layers[-1].bias, mask, True)
        total = lambda m, x: jnp.sum(eqg.mask_gradient(m, mask)(x))
        grads = eqx.filter_grad(total)(mlp, jnp.ones(2))
        assert_close(grads.layers[-1].bias, jnp.ones(3))
        assert not jnp.any(grads.layers[0].weight)
        assert not jnp.any(grads.layers[-1].weight)

    def test_nothing_gets_through(self):
        ct = jnp.array([jnp.nan, jnp.inf, 3.0, jnp.nan])
        stopped = gradient_of(lambda x: eqg.mask_gradient(x, ~jnp.isnan(ct)), ct)
        assert bits(stopped) == bits(jnp.array([0.0, jnp.inf, 3.0, 0.0]))
        for mask in (False, np.False_, jnp.array(False), np.zeros(4, bool)):
            assert not jnp.any(gradient_of(lambda x, m=mask: eqg.mask_gradient(x, m), ct))

    def test_traced_mask(self):
        masked = lambda x, m: jnp.sum(eqg.mask_gradient(x, m) ** 2)
        x = jnp.arange(3.0)
        masks = jnp.array([[True, False, True], [False, True, True]])
        want = jnp.where(masks, 2 * x[None], 0)
        assert_close(jax.jit(jax.vmap(jax.grad(masked), (None, 0)))(x, masks), want)


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

    def test_traced_deviation_and_unused_leaves(self, getkey):
        key = getkey()

        def first(x, stddev):
            return eqg.noise_gradient(x, key=key, stddev=stddev)["a"]

        x = {"a": 0.0, "b": 0.0}
        assert jax.jit(jax.grad(first))(x, 0.0) == {"a": 1.0, "b": 0.0}
        # All leaves have noise, also one of which nothing depends.
        assert jax.jit(jax.grad(first))(x, 1.0)["b"] != 0
        assert jax.grad(first)(x, 1.0)["b"] == jax.jit(jax.grad(first))(x, 1.0)["b"]

    def test_complex(self, getkey):
        z = jnp.zeros(20_000, complex)
        noise = gradient_of(lambda z: eqg.noise_gradient(z, key=getkey(), stddev=2.0), z)
        assert np.isclose(np.var(noise), 4, rtol=0.05)


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

    def test_wider_is_the_identity(self, getkey):
        ct = jr.normal(getkey(), (9,), jnp.bfloat16)
        assert bits(gradient_of(lambda x: eqg.cast_gradient(x, jnp.float32), ct)) == bits(ct)

    def test_complex(self):
        ct = jnp.array([1.2345678 + 7.654321j])
        got = gradient_of(lambda z: eqg.cast_gradient(z, jnp.float16), ct)
        want = np.float16(1.2345678) + 1j * np.float16(7.654321)
        np.testing.assert_array_equal(got, [want])

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

    def test_the_gradient_passes_straight_through(self):
        x, ct = jnp.array([-1.5, 0.25, 2.0]), jnp.array([1.0, 2.0, 3.0])
        nonnegative = optax.projections.projection_non_negative
        # The recipes of the page: a projection, and a clip that keeps the gradient.
        for op in (
            eqg.with_gradient_of(nonnegative, lambda x: x),
            lambda x: eqg.ste.clip(x, -1.0, 1.0),
        ):
            square = lambda x, op=op: jnp.sum(op(x) ** 2)
            pulled, grad, hessian = compiled(
                [
                    lambda x, op=op: jax.vjp(op, x)[1](ct)[0],
                    jax.grad(square),
                    jax.hessian(square),
                ],
                x,
            )
            assert_close((pulled, grad, hessian), (ct, 2 * op(x), 2 * jnp.eye(3)))
        total = lambda x: jnp.sum(eqg.with_gradient_of(nonnegative, lambda x: x)(x)["a"] ** 2)
        assert_close(jax.grad(total)({"a": x})["a"], jnp.array([0.0, 0.5, 4.0]))

    @pytest.mark.thorough
    def test_second_order_in_a_scan(self):
        """The same as unrolled, also on JAX 0.10 and 0.11."""
        op = lambda h: eqg.with_gradient_of(jnp.round, lambda h: h)(2 * h)
        scanned = lambda x: jax.lax.scan(lambda h, _: (op(h) ** 2, None), x, None, length=2)[0]
        unrolled = lambda x: op(op(x) ** 2) ** 2
        for derivative in (jax.grad(jax.grad(scanned)), jax.hessian(scanned)):
            assert derivative(1.1) == jax.hessian(unrolled)(1.1) != 0


MESH = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))


class TestPsum:
    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("where", ["inside", "outside"])
    def test_as_on_one_device(self, where, check_vma, getkey):
        if where == "outside" and not check_vma:
            return  # JAX sums by itself, and says nothing of it
        weight, xs = {"w": jr.normal(getkey(), (3,)), "n": 2}, jr.normal(getkey(), (8, 3))

        def loss(weight, xs):
            w = weight["w"]
            return jnp.sum(jnp.sin(xs @ w))

        of_shard = lambda w, xs: loss(eqg.psum_gradient({**weight, "w": w}, "i"), xs)
        shard_map = ft.partial(
            jax.shard_map, mesh=MESH, in_specs=(Spec(), Spec("i")), check_vma=check_vma
        )
        if where == "inside":
            grad = shard_map(jax.grad(of_shard), out_specs=Spec())
        else:
            per_device = shard_map(lambda w, xs: of_shard(w, xs)[None], out_specs=Spec("i"))
            grad = jax.grad(lambda w, xs: jnp.sum(per_device(w, xs)))
        want = eqx.filter_grad(loss)(weight, xs)["w"]
        assert_close(jax.jit(grad)(weight["w"], xs), want)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_forward_mode_is_the_identity(self, check_vma):
        f = lambda x: eqg.psum_gradient(x, ("i",))[None]
        f = jax.shard_map(
            f, mesh=MESH, in_specs=Spec(), out_specs=Spec("i"), check_vma=check_vma
        )
        y, t = jax.jvp(jax.jit(f), (2.0,), (3.0,))
        assert_close((y, t), (jnp.full(4, 2.0), jnp.full(4, 3.0)))

    def test_vmap(self):
        grad = jax.grad(lambda w, x: jnp.sin(eqg.psum_gradient(w, "batch") * x))
        grads = jax.vmap(grad, (None, 0), axis_name="batch")(0.5, jnp.arange(3.0))
        xs = np.arange(3.0)
        assert_close(grads, jnp.full(3, np.sum(xs * np.cos(0.5 * xs))))


# ---------------------------------------------------------------- recurrent networks


def recurrent_loss(clip, params, xs, targets):
    """A network that is to repeat what it heard three steps before."""

    def step(h, x):
        h = jnp.tanh(params["recurrent"] @ h + params["input"] * x)
        return clip(h), h @ params["output"]

    h = jnp.zeros_like(params["input"])
    return jnp.mean((jax.lax.scan(step, h, xs)[1] - targets) ** 2)


@pytest.mark.slow
def test_an_expansive_network_of_1000_steps_trains_with_per_step_clipping(getkey):
    n, steps = 24, 1000
    params = {
        "recurrent": 3 * jr.normal(getkey(), (n, n), jnp.float32) / n**0.5,
        "input": jr.normal(getkey(), (n,), jnp.float32),
        "output": jnp.zeros(n, jnp.float32) + 0.1,
    }
    xs = jr.normal(getkey(), (steps,), jnp.float32)
    targets = jnp.roll(xs, 3).at[:3].set(0)
    raw = jax.jit(jax.grad(ft.partial(recurrent_loss, lambda h: h)))(params, xs, targets)
    assert not jnp.all(jnp.isfinite(raw["recurrent"]))
    # The optimizer comes too late for it.
    clipped, _ = optax.clip_by_global_norm(1.0).update(raw, optax.EmptyState())
    assert not all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(clipped))

    clip = lambda h: eqg.clip_gradient_norm(h, 0.01)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))

    @jax.jit
    def train(params):
        def update(state, _):
            params, opt_state = state
            loss = ft.partial(recurrent_loss, clip)
            value, grads = jax.value_and_grad(loss)(params, xs, targets)
            with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
                updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), value

        return jax.lax.scan(update, (params, optimizer.init(params)), None, length=40)[1]

    losses = train(params)
    assert jnp.all(jnp.isfinite(losses))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_domain_adaptation(tmp_path):
    """Moons, rotated by 35 degrees: what was learned of those that are not carries over."""
    root = pathlib.Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, str(root / "examples" / "domain_adaptation.py"), "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    without, with_reversal = json.loads((tmp_path / "out" / "result.json").read_text()).values()
    assert 0.74 < without < 0.81
    assert with_reversal >= 0.9


# ---------------------------------------------------------------- errors


def _first_column(g):
    return {"w": g["w"][:, 0]}


X3 = {"w": np.zeros((2, 3), np.float32)}
NOISE = {"key": jr.key(0)}
total = lambda fn: jax.grad(lambda x: jnp.sum(eqg.on_backward(x, fn)["w"]))(X3)
scalar = lambda fn: jax.grad(lambda x: eqg.on_backward(x, fn))(1.0)
NO_BROADCAST = r"The `{}` of `{}` does not broadcast to `x`"
# A call, and what the error says.
WRONG = [
    (lambda: eqg.scale_gradient(X3, np.ones(2)), NO_BROADCAST.format("s", "scale_gradient")
        + r".\n  `s` is float64\[2\], x\['w'\] is float32\[2,3\]\n.*broadcast"),
    (lambda: eqg.reverse_gradient(1.0, jnp.ones(3)),
        NO_BROADCAST.format("strength", "reverse_gradient")),
    (lambda: eqg.scale_gradient(X3, 1j), r"a complex `s` for a real array.\n.*x\['w'\]"),
    (lambda: eqg.clip_gradient(X3, 1.0, -1.0),
        r"a `min` that exceeds `max`.\n  `min` is 1.0, `max` is -1.0"),
    (lambda: eqg.clip_gradient(X3, float("nan"), 1.0), r"a `min` that exceeds `max`"),
    (lambda: eqg.clip_gradient(X3, np.array([0, 0, 2]), 1), r"a `min` that exceeds `max`"),
    (lambda: eqg.clip_gradient(X3, None, np.ones((5, 2, 3))),
        NO_BROADCAST.format("max", "clip_gradient")),
    (lambda: eqg.clip_gradient(X3, 1j, None), r"a complex `min` for a real array"),
    (lambda: eqg.clip_gradient_norm(X3, -1.0),
        r"`max_norm` of `clip_gradient_norm` is not positive or zero.\n  it is -1.0"),
    (lambda: eqg.clip_gradient_norm(X3, float("nan")), r"is not positive or zero"),
    (lambda: eqg.clip_gradient_norm(X3, np.ones(3)), r"`max_norm` .* is not a number"),
    (lambda: eqg.clip_gradient_norm({**X3, "b": 1.0}, 1.0, -1),
        r"an axis that `x\['b'\]` does not have.\n  `axis` is -1, `x\['b'\]` is float"),
    (lambda: eqg.normalize_gradient(X3, eps=-1e-3), r"`eps` .* is not positive or zero"),
    (lambda: eqg.normalize_gradient(X3, (0, 2)), r"an axis that `x\['.'\]` does not have"),
    (lambda: eqg.mask_gradient(X3, {"v": True}),
        r"a `mask` of another structure than `x`.\n  `x` is (?s:.)*`mask` is {'v': True}"),
    (lambda: eqg.mask_gradient(np.zeros(3), (True, False)), r"another structure than `x`"),
    (lambda: eqg.mask_gradient(X3, np.ones(2, bool)),
        NO_BROADCAST.format("mask", "mask_gradient")),
    (lambda: eqg.mask_gradient(X3, np.ones(3)),
        r"that is not boolean.\n  for x\['w'\]: `mask` is float64\[3\]\n.*scale_gradient"),
    (lambda: eqg.noise_gradient(X3, **NOISE, stddev=-1.0), r"`stddev` .* is not positive or z"),
    (lambda: eqg.noise_gradient(X3, **NOISE, stddev=np.ones(2)),
        NO_BROADCAST.format("stddev", "noise_gradient")),
    (lambda: eqg.cast_gradient(X3, jnp.int8), r"that is not floating.\n  `dtype` is int8"),
    (lambda: eqg.cast_gradient(X3, "float7"), r"that is not floating.\n  `dtype` is float7"),
    (lambda: total(_first_column),
        r"`_first_column`, which was given to `on_backward`, did not return a gradient of "
        r"`x`.\n  at gradient\['w'\]: it was called with float32\[2,3\], and "
        r"returned float32\[2\]\n  in `_first_column`, file "),
    (lambda: total(jax.tree.leaves), r"`on_backward`, did not return a gradient of `x`"),
    (lambda: scalar(lambda g: g > 0), r"with float32\[\], and returned bool"),
    (lambda: scalar(lambda g: 1j * g), r"with float32\[\], and returned complex64\[\]"),
    (lambda: eqg.psum_gradient(X3, "j"),
        r"an axis that does not exist here.\n  `axis_name` is 'j'\n.*shard_map"),
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
