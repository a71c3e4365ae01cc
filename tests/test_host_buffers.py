"""Memory between JAX and host code: what host code writes over, residuals that stay on the
host, and 64 bits. Against the same functions in JAX."""

import collections
import concurrent.futures
import types

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]

BOTH = (lambda f: f), jax.jit


# ---------------------------------------------------------------- the same memory in each call


class Workspace:
    """One piece of memory for each name, shape and dtype, as C and Fortran have it. All
    functions and rules of a test share it, so that each call overwrites earlier results."""

    def __init__(self):
        self._buffers = {}

    def __call__(self, name, value):
        value = np.asarray(value)
        key = (name, value.shape, value.dtype)
        buffer = self._buffers.setdefault(key, np.zeros((2, *value.shape), value.dtype))
        buffer[1] = value
        return buffer[1, ...]  # a view


def make(*rules, **options):
    """`sin(x) * y`, with these rules."""
    w = Workspace()
    value = lambda x, y: w("0", np.sin(x) * y)
    f = eqg.host_function(value, out=lambda x, y: x, **options)
    fwd = lambda x, y: (value(x, y), {"x": w("x", x), "y": [w("y", y)], "cos": np.cos(x)})

    def bwd(residuals, ct):
        x, y = residuals if type(residuals) is tuple else (residuals["x"], *residuals["y"])
        return w("0", ct * np.cos(x) * y), w("1", ct * np.sin(x))

    def jvp(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return value(x, y), w("0", np.cos(x) * y * t_x + np.sin(x) * t_y)

    if "fwd" in rules:
        f.def_fwd(fwd)
    if "bwd" in rules:
        f.def_bwd(bwd)
    if "jvp" in rules:
        f.def_jvp(jvp)
    return f


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ("", {"finite_difference": "central"}),
        ("", {"finite_difference": "complex"}),
        ("jvp", {}),
        ("bwd", {}),
        ("fwd bwd", {}),
        ("fwd bwd jvp", {}),
    ],
)
def test_each_call_overwrites_the_last(rules, options):
    f = make(*rules.split(), **options)
    x, y = jnp.linspace(-1.1, 1.4, 3), jnp.linspace(0.6, -0.8, 3)
    loss = lambda f: lambda x, y: jnp.sum(f(f(x, y), y) ** 3)
    ways = lambda f: [jax.jacfwd(f, (0, 1)), jax.grad(loss(f), (0, 1))]
    tolerance = 2e-4 if "central" in options.values() else 2e-6
    for got, expected in zip(ways(f), ways(lambda x, y: jnp.sin(x) * y), strict=True):
        for transform in BOTH:
            assert_close(transform(got)(x, y), expected(x, y), tolerance=tolerance)


def test_arguments_and_residuals_are_read_only():
    """A rule that writes into them would change the arguments of its next call."""

    def writes(x):
        x *= 2
        return x

    x = jnp.arange(1.0, 4.0)
    like = {"out": lambda x: x}
    f = eqg.host_function(writes, **like, finite_difference="central")
    g = eqg.host_function(np.sin, **like)
    g.def_fwd(lambda x: (np.sin(x), {"cos": np.cos(x)}))
    g.def_bwd(lambda residuals, ct: (writes(residuals["cos"]) * ct,))
    h = eqg.host_function(np.sin, **like)
    h.def_bwd(lambda residuals, ct: (writes(ct),))
    h.def_jvp(lambda primals, tangents: (np.sin(primals[0]), writes(tangents[0])))
    push = lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]
    pull = lambda f: lambda x: jax.vjp(f, x)[1](x)
    for program in (f, pull(f), pull(g), push(g), pull(h), push(h)):
        with pytest.raises(ValueError, match="read-only"):
            program(x)
        with pytest.raises(jax.errors.JaxRuntimeError, match="read-only"):
            jax.block_until_ready(jax.jit(program)(x))


# ---------------------------------------------------------------- how often a rule is called


def counted(keep=8, **options):
    """The sine, and how often its rules are called."""
    counts = collections.Counter()
    f = eqg.host_function(np.sin, out=lambda x: x, **options)

    @f.def_fwd(keep=keep)
    def f_fwd(x):
        counts["fwd"] += 1
        return np.sin(x), {"anything": [{"cos": np.cos(x)}], "no array": object()}

    @f.def_bwd
    def f_bwd(kept, ct):
        counts["bwd"] += 1
        return (kept["anything"][0]["cos"] * ct,)

    return f, counts


def test_residuals_stay_on_the_host():
    f, counts = counted()
    x = jnp.array([0.5, 1.0])
    grad = jax.value_and_grad(lambda x: jnp.sum(f(x)))
    for i, call in enumerate((grad, jax.jit(grad)), 1):
        x = x + 0.5
        assert_close(call(x)[1], jnp.cos(x))
        assert counts == {"fwd": i, "bwd": i}
    # Without the value, the forward pass is dead code, and the backward pass makes up for it.
    jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(x + 1)
    assert counts == {"fwd": 3, "bwd": 3}


def of_batch(f, xs):
    return jnp.sum(jax.vmap(f)(xs) ** 2)  # so that the backward pass is later


def of_scan(f, xs):
    return jax.lax.scan(lambda y, x: (f(x + y), None), 0.0, xs)[0]


@pytest.mark.parametrize(
    ("loss", "keep", "again"),
    [
        # Of ten calls, so many are kept. Those computed again are dropped first.
        (of_batch, 8, 3),
        (of_scan, 8, 2),
        (of_batch, 3, 8),
        (of_scan, 3, 7),
    ],
)
def test_residuals_that_are_not_kept_are_computed_again(loss, keep, again):
    f, counts = counted(keep=keep)
    xs = jnp.arange(10.0) / 10
    got = jax.jit(jax.value_and_grad(lambda xs: loss(f, xs)))(xs)
    assert_close(got, jax.value_and_grad(lambda xs: loss(jnp.sin, xs))(xs))
    assert counts == {"fwd": 10 + again, "bwd": 10}


@pytest.mark.parametrize(
    ("keep", "kind", "n_calls"),
    [(0, "array", 6), (1, "array", 5), (2, "array", 4), (3, "array", 3), (3, "objects", 3),
     (3, "one object", 5)],
)  # fmt: skip
def test_residuals_that_are_objects(keep, kind, n_calls):
    """What is not kept, or belongs to a later call, is computed again."""
    calls, one = [], types.SimpleNamespace()

    def fwd(x):
        calls.append(x)
        kept = one if kind == "one object" else types.SimpleNamespace()
        kept.cos = np.cos(x)
        return np.sin(x), kept.cos if kind == "array" else kept

    sin = eqg.host_function(np.sin, out=lambda x: x)
    sin.def_fwd(fwd, keep=keep)
    sin.def_bwd(lambda kept, ct: (getattr(kept, "cos", kept) * ct,))
    got, want = (jax.grad(lambda x, f=f: f(f(f(x))))(1.0) for f in (sin, jnp.sin))
    assert_close(got, want)
    assert len(calls) == n_calls


@pytest.mark.parametrize(("transform", "keep"), [(BOTH[0], 8), (jax.jit, 1), (jax.jit, 0)])
@pytest.mark.parametrize("mode", [jax.jacrev, jax.jacfwd])
def test_a_jacobian_runs_the_forward_rule_once(transform, mode, keep):
    f, counts = counted(keep=keep)
    x = jnp.array([[0.1, 0.2], [0.3, 0.4]])
    assert_close(transform(mode(f))(x), jax.jacfwd(jnp.sin)(x))
    assert counts["bwd"] == 4
    assert counts["fwd"] == (1 if keep else 4)


@pytest.mark.parametrize("transform", BOTH)
def test_a_hessian_runs_the_forward_rule_once_at_each_point(transform):
    f, counts = counted(finite_difference="central")
    with jax.enable_x64(True):
        x = jnp.array([0.1, 0.2, 0.3])
        hessian = lambda f: transform(jax.hessian(lambda x: jnp.sum(f(x) ** 3)))(x)
        assert_close(hessian(f), hessian(jnp.sin), tolerance=1e-9)
    assert counts["fwd"] == 7  # at `x`, and with each element moved up and down


def test_residuals_of_other_types_with_the_same_bytes():
    f = eqg.host_function(np.multiply, out=lambda x, y: x, vmap_method="expand_dims")
    f.def_fwd(lambda x, y: (x * y, (x, y)))
    f.def_bwd(lambda residuals, ct: (ct * residuals[1], ct * residuals[0]))

    def loss(product, x, xs, y, ys):
        first, second = jax.vmap(product, (0, None))(xs, y), jax.vmap(product, (None, 0))(x, ys)
        return jnp.sum(first**2) + jnp.sum(second**3)

    args = 1.0, jnp.array([1.0, 2.0]), 3.0, jnp.array([2.0, 3.0])
    of = lambda product: jax.jit(jax.grad(lambda *args: loss(product, *args), (0, 1, 2, 3)))
    assert_close(of(f)(*args), of(jnp.multiply)(*args))
    factor = lambda n: 2.0 + (n.dtype.kind == "i") + 2 * n.ndim
    g = eqg.host_function(lambda x, n: x * factor(n), out=lambda x, n: x)
    g.def_fwd(lambda x, n: (x * factor(n), factor(n)))
    g.def_bwd(lambda residuals, ct: (ct * residuals, None))
    zeros = jnp.zeros(()), jnp.zeros((), int), jnp.zeros((), "int32"), jnp.zeros(1)
    assert jax.grad(lambda x: sum(g(x, n) for n in zeros))(1.0) == 2 + 3 + 3 + 4


# ---------------------------------------------------------------- threads


def test_python_threads():
    """They share the residuals on the host."""
    f, _ = counted(keep=2)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 3)))
    points = [jnp.full(3, 0.1 * i) for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(grad, points))
    expected = [3 * jnp.sin(x) ** 2 * jnp.cos(x) for x in points]
    assert_close(got, expected, tolerance=1e-4)


@pytest.mark.slow
def test_large_arrays_of_float64():
    """With enough numbers for XLA to run the callback on another thread, which is not in 64
    bits. There, JAX raises "Expected: float64, Actual: float32" in most calls."""
    sine, _ = counted()

    def at_once(fn, x):
        a = jnp.outer(x, x) + 5 * jnp.eye(x.size, dtype=x.dtype)
        return jnp.sum(jnp.linalg.cholesky(a)) + jnp.sum(fn(x)) + jnp.sum(fn(x + 1) @ a)

    with jax.enable_x64(True):
        gradient = jax.jit(jax.value_and_grad(lambda x: at_once(sine, x)))
        expected = jax.value_and_grad(lambda x: at_once(jnp.sin, x))
        for i in range(3):
            x = jnp.linspace(0.0, 1.0, 1000) + i
            for got, want in zip(gradient(x), expected(x), strict=True):
                assert got.dtype == jnp.float64
                assert np.allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64", "bool"])
@pytest.mark.parametrize("vmap_method", ["sequential", "expand_dims"])
def test_all_bits_arrive(dtype, vmap_method):
    seen = []

    def same(x, y):
        seen.append((x.dtype, y.dtype))
        return x, y

    fn = eqg.host_function(same, out=lambda x, y: (x, y), vmap_method=vmap_method)
    with jax.enable_x64(True):
        y = jnp.array([0.1, 0.2, 0.3], "float32")
        x = jnp.array([2.0**40 + 2**-10 + 1j / 3, -1.0, 0.0]) if dtype == "complex128" else y
        x = x.astype(dtype) if dtype != "int64" else jnp.array([2**40 + 1, -1, 0])
        for call in (jax.jit(fn), jax.vmap(fn), jax.jit(jax.vmap(fn))):
            got = call(x, y)
            assert [g.dtype for g in got] == [x.dtype, y.dtype]
            assert all(map(jnp.array_equal, got, (x, y)))
    assert {(str(a), str(b)) for a, b in seen} == {(dtype, "float32")}
