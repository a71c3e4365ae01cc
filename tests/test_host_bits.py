"""Host functions in a context with 64 bits, of which the threads of callbacks know nothing."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


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


@pytest.mark.slow
def test_rules_and_transformations_in_a_context():
    x = np.array([0.3, 0.8, -1.2])
    for options in ({}, {"vmap_method": "expand_dims"}):
        with jax.enable_x64(True):
            eqgt.check_rule(_sine(**options), jnp.asarray(x), order=1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"finite_difference": "complex"}])
def test_a_gradient_of_float32_is_compared_in_float64(options):
    """`check_gradients` makes the context itself."""
    sine = _sine() if not options else eqg.host_function(np.sin, out=lambda x: x, **options)
    x = jnp.linspace(0.0, 1.0, 300, dtype="float32")
    loss = lambda w, x: _at_once(sine, w * x)
    report = eqgt.check_gradients(loss, jnp.array(0.7, "float32"), x)
    assert "In float64" not in str(report)
