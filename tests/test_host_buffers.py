"""Host code that writes all it returns into the same memory in each call, as C and Fortran do,
against the same functions in JAX."""

import collections
import ctypes

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


class Workspace:
    """One piece of memory for each name, shape and dtype. All functions and rules of a test
    share it, so that each call overwrites what an earlier one returned."""

    def __init__(self):
        self._buffers = {}

    def __call__(self, name, value):
        value = np.asarray(value)
        key = (name, value.shape, value.dtype)
        buffer = self._buffers.setdefault(key, np.zeros((2, *value.shape), value.dtype))
        buffer[1] = value
        return buffer[1, ...]  # a view


def _jax(x, p):
    return {"a": jnp.sin(x) * p["y"], "b": (jnp.cos(x * p["y"]), jnp.exp(p["y"]))}


def _like(x, p):
    return {"a": x, "b": (x, x)}


def make(*rules, residuals=None, **options):
    """The function, with these rules."""
    w = Workspace()

    def value(x, y):
        b = w("1", np.cos(x * y)), w("2", np.exp(y + 0 * x))
        return {"a": w("0", np.sin(x) * y), "b": b}

    f = eqg.host_function(lambda x, p: value(x, p["y"]), out=_like, **options)

    def fwd(x, p):
        y = p["y"]
        kept = {"x": w("x", x), "y": [w("y", y)], "sin": w("sin", np.sin(x)), "exp": np.exp(y)}
        return value(x, y), kept

    def bwd(residuals, ct):
        if "def_fwd" in rules:
            x, (y,), sin, exp = (residuals[name] for name in ("x", "y", "sin", "exp"))
        else:
            x, y = residuals[0], residuals[1]["y"]
            sin, exp = np.sin(x), np.exp(y)
        ct_a, (ct_b, ct_c) = ct["a"], ct["b"]
        of_product = -np.sin(x * y) * ct_b
        ct_x = ct_a * np.cos(x) * y + of_product * y
        ct_y = ct_a * sin + of_product * x + ct_c * exp
        return w("0", ct_x), {"y": w("1", ct_y)}

    def jvp(primals, tangents):
        (x, p), (t_x, t_p) = primals, tangents
        y, t_y = p["y"], t_p["y"]
        t_a = np.cos(x) * y * t_x + np.sin(x) * t_y
        t_b = -np.sin(x * y) * (t_x * y + x * t_y)
        out = value(x, y)
        return out, {"a": w("0", t_a), "b": (w("1", t_b), w("2", np.exp(y) * t_y))}

    if "def_fwd" in rules:
        f.def_fwd(fwd, residuals=residuals)
    if "def_bwd" in rules:
        f.def_bwd(bwd)
    if "def_jvp" in rules:
        f.def_jvp(jvp)
    return f


_residual_types = lambda x, p: {"x": x, "y": [x], "sin": x, "exp": x}
FORMS = {
    "central": ((), {"finite_difference": "central"}),
    "complex": ((), {"finite_difference": "complex"}),
    "def_jvp": (("def_jvp",), {}),
    "def_bwd": (("def_bwd",), {}),
    "residuals on the host": (("def_fwd", "def_bwd"), {}),
    "residuals in JAX": (("def_fwd", "def_bwd"), {"residuals": _residual_types}),
    "both rules": (("def_fwd", "def_bwd", "def_jvp"), {}),
}


def _first_order(f, x, p):
    return (
        jax.jvp(f, (x, p), (p["y"], {"y": x}))[1],
        jax.jacfwd(f, (0, 1))(x, p),
        jax.jacrev(f, (0, 1))(x, p),
        jax.grad(lambda x, p: _loss(f(x, p)), (0, 1))(x, p),
    )


def _loss(out):
    return sum(jnp.sum(x**3) for x in jax.tree.leaves(out))


@pytest.mark.parametrize("form", FORMS)
def test_first_order(form):
    rules, options = FORMS[form]
    f = make(*rules, **options)
    x, y = np.linspace(-1.1, 1.4, 3), np.linspace(0.6, -0.8, 3)
    x, p = jnp.asarray(x, np.float32), {"y": jnp.asarray(y, np.float32)}
    expected = _first_order(_jax, x, p)
    tolerance = 2e-4 if options.get("finite_difference") == "central" else 2e-6
    assert_close(_first_order(f, x, p), expected, tolerance=tolerance)
    compiled = jax.jit(lambda x, p: _first_order(f, x, p))(x, p)
    assert_close(compiled, expected, tolerance=tolerance)


@pytest.mark.parametrize("is_complex", [False, True])
def test_a_linear_map(is_complex):
    w = Workspace()
    dtype = np.complex64 if is_complex else np.float32
    matrix = np.array([[1, -2, 0.5], [0.3, 1, 2]]) * (1 + 2j if is_complex else 1)
    matrix = matrix.astype(dtype)
    f = eqg.linear_host_function(
        lambda x: w("", matrix @ x),
        lambda y: w("", matrix.conj().T @ y),
        out=jnp.zeros(2, dtype),
    )
    x = jnp.array([1.0, 2.0, -1.0], dtype)
    witness = lambda x: jnp.asarray(matrix) @ x
    loss = lambda f: lambda x: jnp.sum(jnp.abs(f(x)) ** 4)
    derivatives = lambda f: (
        jax.vmap(f)(jnp.stack([x, 2 * x])),
        jax.linearize(f, x)[1](x),
        jax.grad(loss(f))(x),
        jax.jvp(jax.grad(loss(f)), (x,), (x,))[1],
        jax.linear_transpose(f, x)(f(x)),
    )
    assert_close(derivatives(f), derivatives(witness), tolerance=1e-4)
    assert_close(jax.jit(lambda: derivatives(f))(), derivatives(witness), tolerance=1e-4)


# ---------------------------------------------------------------- other memory than arrays


@pytest.mark.parametrize("rule", ["central", "def_bwd", "def_jvp"])
def test_an_array_of_c(rule):
    """NumPy shares the memory of what it makes an array of."""
    memory = (ctypes.c_double * 3)()

    def filled(x):
        memory[:] = [float(value) for value in x]
        return memory

    options = {"finite_difference": "central"} if rule == "central" else {}
    f = eqg.host_function(lambda x: filled(np.sin(x)), out=lambda x: x, **options)
    if rule == "def_bwd":
        f.def_bwd(lambda residuals, ct: (filled(np.cos(residuals[0]) * ct),))
    if rule == "def_jvp":
        f.def_jvp(lambda primals, ts: (np.sin(primals[0]), filled(np.cos(primals[0]) * ts[0])))
    x = jnp.arange(1.0, 4.0)
    for derivative in (jax.jacfwd, jax.jacrev, lambda f: jax.jit(jax.jacrev(f))):
        assert_close(derivative(f)(x), jnp.diag(jnp.cos(x)), tolerance=1e-4)


class Solver:
    """Has one factorization, of the last matrix."""

    def factorize(self, matrix):
        self.inverse = np.linalg.inv(matrix)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_one_object_that_all_calls_return(transform):
    solver, counts = Solver(), collections.Counter()
    f = eqg.host_function(np.linalg.solve, out=lambda matrix, b: b)

    @f.def_fwd
    def f_fwd(matrix, b):
        counts["fwd"] += 1
        solver.factorize(matrix)
        x = solver.inverse @ b
        return x, {"solver": solver, 0: x}

    @f.def_bwd
    def f_bwd(residuals, ct):
        ct_b = residuals["solver"].inverse.T @ ct
        return -np.outer(ct_b, residuals[0]), ct_b

    matrices = [jnp.eye(2) * k + 0.3 * jnp.arange(4.0).reshape(2, 2) for k in (1, 2, 3)]

    def loss(solve):
        def run(matrices, b):
            for matrix in matrices:
                b = solve(matrix, b)
            return jnp.sum(b**2)

        return run

    b = jnp.array([1.0, -2.0])
    grads = transform(jax.grad(loss(f), (0, 1)))(matrices, b)
    assert_close(grads, jax.grad(loss(jnp.linalg.solve), (0, 1))(matrices, b), eps=200)
    assert counts["fwd"] == 5  # the last step is the first to be differentiated


# ---------------------------------------------------------------- what host code is given


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


def _counted(residuals=None, keep=8, **options):
    counts = collections.Counter()
    f = eqg.host_function(np.sin, out=lambda x: x, **options)

    @f.def_fwd(residuals=residuals, keep=keep)
    def f_fwd(x):
        counts["fwd"] += 1
        return np.sin(x), {"cos": np.cos(x)}

    @f.def_bwd
    def f_bwd(residuals, ct):
        counts["bwd"] += 1
        return (residuals["cos"] * ct,)

    return f, counts


@pytest.mark.parametrize("keep", [8, 1])
@pytest.mark.parametrize("mode", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_jacobian_runs_the_forward_rule_once(transform, mode, keep):
    f, counts = _counted(keep=keep)
    x = jnp.array([[0.1, 0.2], [0.3, 0.4]])
    derivative = transform(mode(f))
    expected = jax.jacfwd(jnp.sin)(x)
    assert_close(derivative(x), expected)
    assert counts == {"fwd": 1, "bwd": 4}
    assert_close(derivative(x), expected)
    assert counts["fwd"] <= 2  # a compiled program finds the residuals of the first


@pytest.mark.parametrize("residuals", [None, lambda x: {"cos": x}])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_hessian_runs_the_forward_rule_once_at_each_point(transform, residuals):
    f, counts = _counted(residuals, finite_difference="central")
    with jax.enable_x64(True):
        x = jnp.array([0.1, 0.2, 0.3])
        hessian = lambda f: transform(jax.hessian(lambda x: jnp.sum(f(x) ** 3)))(x)
        assert_close(hessian(f), hessian(jnp.sin), tolerance=1e-9)
    assert counts["fwd"] == 7  # at `x`, and with each element moved up and down


@pytest.mark.parametrize(("again", "in_a_scan"), [(3, False), (2, True)])
def test_residuals_that_are_computed_again_are_dropped_first(again, in_a_scan):
    """The others are needed later in the same backward pass: of ten calls, eight are kept."""
    f, counts = _counted()

    def loss(f):
        def run(xs):
            if in_a_scan:
                return jax.lax.scan(lambda y, x: (f(x + y), None), 0.0, xs)[0]
            return jnp.sum(jax.vmap(f)(xs) ** 2)  # so that the backward pass is later

        return run

    xs = jnp.arange(10.0) / 10
    assert_close(jax.jit(jax.grad(loss(f)))(xs), jax.grad(loss(jnp.sin))(xs))
    assert counts == {"fwd": 10 + again, "bwd": 10}


def test_residuals_of_other_shapes_with_the_same_bytes():
    f = eqg.host_function(np.multiply, out=lambda x, y: x, vmap_method="expand_dims")
    f.def_fwd(lambda x, y: (x * y, (x, y)))
    f.def_bwd(lambda residuals, ct: (ct * residuals[1], ct * residuals[0]))

    def loss(product, x, xs, y, ys):
        first, second = jax.vmap(product, (0, None))(xs, y), jax.vmap(product, (None, 0))(x, ys)
        return jnp.sum(first**2) + jnp.sum(second**3)

    args = 1.0, jnp.array([1.0, 2.0]), 3.0, jnp.array([2.0, 3.0])
    of = lambda product: jax.jit(jax.grad(lambda *args: loss(product, *args), (0, 1, 2, 3)))
    assert_close(of(f)(*args), of(jnp.multiply)(*args))


def test_residuals_of_which_none_are_kept():
    f, counts = _counted(keep=0)
    jax.jit(jax.jacrev(f))(jnp.ones(3)).block_until_ready()
    assert counts["fwd"] == 3


# ---------------------------------------------------------------- 64 bits in one thread


def _sine(**options):
    fn = eqg.host_function(np.sin, out=lambda x: x, **options)
    fn.def_bwd(lambda residuals, ct: (ct * np.cos(residuals[0]),))
    fn.def_jvp(lambda p, t: (np.sin(p[0]), np.cos(p[0]) * t[0]))
    return fn


def _at_once(fn, x):
    """With enough numbers for XLA to run the callback on another thread."""
    a = jnp.outer(x, x) + 5 * jnp.eye(x.size, dtype=x.dtype)
    return jnp.sum(jnp.linalg.cholesky(a)) + jnp.sum(fn(x)) + jnp.sum(fn(x + 1) @ a)


@pytest.mark.slow
def test_large_arrays_of_float64():
    """JAX raises "Expected: float64, Actual: float32" in most calls, if it is given these."""
    sine = _sine()
    with jax.enable_x64(True):
        gradient = jax.jit(jax.value_and_grad(lambda x: _at_once(sine, x)))
        expected = jax.value_and_grad(lambda x: _at_once(jnp.sin, x))
        for i in range(3):
            x = jnp.linspace(0.0, 1.0, 1000) + i
            for got, want in zip(gradient(x), expected(x), strict=True):
                assert got.dtype == jnp.float64
                assert np.allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize(
    "dtype", ["float64", "complex128", "int64", "float32", "int32", "bool"]
)
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
        for call in (jax.jit(fn), jax.vmap(fn), jax.jit(jax.vmap(fn, (0, 0)))):
            got = call(x, y)
            assert [g.dtype for g in got] == [x.dtype, y.dtype]
            assert all(map(jnp.array_equal, got, (x, y)))
    assert {(str(a), str(b)) for a, b in seen} == {(dtype, "float32")}
