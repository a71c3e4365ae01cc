"""Explicit axes of a mesh: types go through loops and rules, and each cotangent has the
sharding of its primal, as JAX's own would have."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads._diagnosis.in_float64 import evaluate_in_float64
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec

from .helpers import assert_close
from .ops import sin_times, sin_times_elementwise, sin_times_jvp, sin_times_vjp
from .test_shard_map import OPTIONS, product, scan_loss, SQUARE, WEIGHT, X, XS


pytestmark = pytest.mark.versions


MESH = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))


def check(fn, plain, specs, *args, eps=20.0):
    """The gradients in all arguments, and where they are."""
    argnums = tuple(range(len(args)))
    expected = jax.grad(plain, argnums)(*args)
    with jax.set_mesh(MESH):
        placed = [
            jax.device_put(x, NamedSharding(MESH, spec))
            for x, spec in zip(args, specs, strict=True)
        ]
        got = jax.jit(jax.grad(fn, argnums))(*placed)
    assert_close([np.asarray(x) for x in got], [np.asarray(x) for x in expected], eps=eps)
    for grad, x in zip(got, placed, strict=True):
        assert grad.sharding.is_equivalent_to(x.sharding, x.ndim)


RULES = (sin_times_jvp, sin_times_vjp, sin_times_elementwise)


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    loss = lambda fn: lambda x, y: jnp.sum(jnp.sin(fn(x, y)))
    args = (jnp.linspace(0.0, 1.0, 8), jnp.linspace(1.0, 3.0, 8))
    check(loss(rule), loss(sin_times), (Spec("i"), Spec("i")), *args)


def test_replicated_weight():
    """Each example has the weight: the sum over the batch is one over the devices."""
    loss = lambda fn: lambda w, x: jnp.sum(jnp.sin(jax.vmap(fn, (None, 0))(w, x)))
    check(loss(product), loss(lambda w, x: x @ w), (Spec(), Spec("i")), WEIGHT, X[:, None])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scan_from_zeros(options):
    fn = lambda weight, xs: scan_loss(options, 8, lambda x: x, weight, xs)
    window = {"truncate": options["truncate"]} if "truncate" in options else {}
    plain = lambda weight, xs: scan_loss(window, 8, lambda x: x, weight, xs)
    check(fn, plain, (Spec(), Spec(None, "i")), SQUARE, XS, eps=500)


def scan_of_roots(root, weight, x):
    step = lambda c, v: (jnp.tanh(c * weight + root(v * weight)), c)
    return jax.lax.scan(step, x, jnp.stack([x, 2 * x]))[1]


@pytest.mark.parametrize(
    "local",
    [
        lambda root, w, x: jax.lax.cond(w[0, 0] > 0, lambda x: root(w * x), lambda x: x * w, x),
        lambda root, w, x: jnp.pad(root(x * w), ((1, 1), (0, 0))),
        lambda root, w, x: jnp.concatenate([root(x * w), x, x * w]),
        lambda root, w, x: w.T @ jnp.cumsum(root(x * w), 0),
        scan_of_roots,
    ],
    ids=["branches", "pad", "concatenate", "products", "scan"],
)
def test_a_root_that_is_not_taken(local):
    """`zero_safe` against the double `where`."""
    root = lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)
    plain = lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)
    loss = lambda root: lambda w, x: jnp.sum(jnp.sin(local(root, w, x)))
    weight, x = jnp.array([[0.5], [2.0]]), jnp.linspace(-1.0, 2.0, 16).reshape(2, 8)
    specs = (Spec(), Spec(None, "i"))
    check(eqg.zero_safe(loss(root)), loss(plain), specs, weight, x, eps=100)


@eqg.implicit(lambda y, a, b: y**2 - a * b)
def elementwise_root(a, b):
    return jnp.sqrt(a * b)


@eqg.implicit(lambda y, a, b: y**2 + 0.1 * jnp.mean(y) - a * b)
def coupled_root(a, b):
    newton = lambda y, _: (y - (y**2 + 0.1 * jnp.mean(y) - a * b) / (2 * y), None)
    return jax.lax.scan(newton, a, length=16)[0]


def coupled_fixed_point(a, b, **options):
    step = lambda y: jnp.cos(0.3 * jnp.mean(y)) + jnp.sin(0.3 * y) * b + a
    return eqg.fixed_point(step, jnp.zeros_like(a), **options).value


def iterated(a, b):
    step = lambda y, _: (jnp.cos(0.3 * jnp.mean(y)) + jnp.sin(0.3 * y) * b + a, None)
    return jax.lax.scan(step, jnp.zeros_like(a), length=60)[0]


# The first has more unknowns than a dense matrix may have.
SOLUTIONS = [
    pytest.param(elementwise_root, lambda a, b: jnp.sqrt(a * b), 320, id="elementwise"),
    pytest.param(coupled_root, coupled_root.__wrapped__, 8, id="coupled"),
    pytest.param(coupled_fixed_point, iterated, 8, id="fixed_point", marks=pytest.mark.slow),
    pytest.param(
        ft.partial(coupled_fixed_point, backward="fixed_point"),
        iterated,
        8,
        id="iterated backward",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("solve", "plain", "n"), SOLUTIONS)
def test_solution_that_is_sharded(solve, plain, n):
    """Each unknown is on one device, and the equation may have them all."""
    loss = lambda fn: lambda a, b: jnp.sum(jnp.sin(fn(a, b)))
    args = jnp.linspace(1.0, 2.0, n), jnp.array(1.5)
    check(loss(solve), loss(plain), (Spec("i"), Spec()), *args, eps=2000)


def test_large_coupled_equation_that_is_sharded():
    solve = eqg.implicit(lambda y, a: y + jnp.mean(y) - a, tolerance=None)(lambda a: a)
    with jax.set_mesh(MESH):
        a = jax.device_put(jnp.linspace(1.0, 2.0, 320), NamedSharding(MESH, Spec("i")))
        with pytest.raises(eqg.RuleError, match=r"use `jax\.sharding\.auto_axes` for explicit"):
            jax.grad(lambda a: jnp.sum(solve(a)))(a)


def test_in_float64_a_conversion_that_moves_an_array_moves_it():
    x = np.arange(8.0, dtype=np.float32)
    with jax.set_mesh(MESH):
        moved = lambda x: x.astype(jnp.float32, device=NamedSharding(MESH, Spec("i")))
        program = jax.make_jaxpr(moved)(x)
        with jax.enable_x64(True):
            (got,) = evaluate_in_float64(program, [jnp.asarray(x)])
        assert jax.typeof(got).sharding.spec == Spec("i")
    assert got.dtype == np.float64
    assert_close(np.asarray(got), np.arange(8.0))
