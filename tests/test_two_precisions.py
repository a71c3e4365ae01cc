"""The checkers compute in both precisions: functions that are another function in float64,
numbers that cancel, and NumPy arrays of 64 bits that a function captures."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from .helpers import conds_keep_keys


pytestmark = pytest.mark.x64

X = jnp.array([0.2, -0.4], "float32")
CHECKS = ("primal", "forward", "reverse")


def with_slope(fn, slope):
    rule = eqg.custom_jvp(fn)
    rule.def_jvp(lambda p, t: (rule(*p), slope(*p) * t[0]))
    return rule


def check(rule, *args, **options):
    return eqgt.check_rule(rule, *args, **{"checks": CHECKS, "raises": False, **options})


# ---------------------------------------------------------------- random draws

DRAWS = {
    "bernoulli": lambda key, x: jr.bernoulli(key, 0.5, x.shape).astype(x.dtype),
    "normal": lambda key, x: jr.normal(key, x.shape, x.dtype),
    "dropout": lambda key, x: eqx.nn.Dropout(0.5)(jnp.ones_like(x), key=key),
}


def drawn_rule(draw, factor):
    @eqg.custom_vjp
    def fn(x, key):
        return draw(key, x) * jnp.sin(x)

    fn.def_fwd(lambda x, key: (fn(x, key), (x, key)))
    fn.def_bwd(lambda saved, ct: (factor * ct * draw(*saved[::-1]) * jnp.cos(saved[0]), None))
    return fn


@pytest.mark.slow
@pytest.mark.parametrize(
    # Those for which float64 draws zeros only, and the user's precision does not; another one.
    ("name", "seed"),
    [("bernoulli", 3), ("bernoulli", 6), ("dropout", 6), ("normal", 0)],
)
def test_a_factor_in_the_rule_of_a_random_function(name, seed):
    draw, key = DRAWS[name], jr.key(seed)
    is_zero = not np.any(draw(key, X))
    right = check(drawn_rule(draw, 1.0), X, key)
    assert right.passed
    assert all(f.tolerance <= 1e-4 for f in right.findings if f.tolerance is not None)
    assert check(drawn_rule(draw, 7.0), X, key).passed == is_zero
    loss = lambda w, key, rule: jnp.sum(rule(w, key))
    report = eqgt.check_gradients(loss, X, key, drawn_rule(draw, 1.0))
    assert [leaf.verdict for leaf in report.leaves] == ["zero" if is_zero else "right"]
    if conds_keep_keys():
        report = eqgt.check_gradients(loss, X, key, drawn_rule(draw, 7.0), raises=False)
        assert report.passed == is_zero


# ---------------------------------------------------------------- branches on a dtype


def _sin_in_single(x):
    return jnp.sin(x) if x.dtype == jnp.float32 else x**2


@pytest.mark.parametrize("fn", [_sin_in_single, lambda x: jnp.round(x)])
def test_a_function_or_reference_that_is_another_in_float64(fn):
    options = {} if fn is _sin_in_single else {"reference": _sin_in_single}
    assert check(with_slope(fn, jnp.cos), X, **options).passed
    report = check(with_slope(fn, lambda x: 2 * x), X, **options)
    assert "reverse" in {failure.check for failure in report.failures}


# ---------------------------------------------------------------- cancellation


def in_single(factor=1.0):
    """With derivatives that are rounded to float32, as a host function may round them."""
    slope = lambda x: (jnp.cos(x) + x).astype("float32")
    value = lambda x: jnp.sum(jnp.sin(x) + x**2 / 2)
    fn = eqg.custom_vjp(value)
    total = lambda x, t: jnp.sum((slope(x) * t).astype("float32")).astype(x.dtype)
    fn.def_jvp(lambda p, t: (value(*p), total(*p, *t)))
    fn.def_fwd(lambda x: (value(x), x))
    fn.def_bwd(lambda x, ct: ((factor * slope(x) * ct.astype("float32")).astype(x.dtype),))
    return fn


@pytest.mark.parametrize(
    ("factor", "name", "seeds", "n_failures"),
    [
        (1.0, "adjoint", [27, 361, 727], 0),
        (1.0, "linear", [108, 120, 329], 0),
        (1.01, "adjoint", range(20), 19),
    ],
)
def test_products_that_cancel(factor, name, seeds, n_failures):
    report = check(
        in_single(factor),
        jnp.cos(jnp.arange(1, 101, dtype="float32") ** 2),
        checks=(name,),
        seed=seeds,
    )
    assert len(report.failures) >= n_failures, report
    assert report.passed == (factor == 1)


# ---------------------------------------------------------------- captured NumPy arrays

# JAX has one constant for both precisions, in that of the first program that is alive.
XS, YS = jnp.array([2.0, -1.0, -0.5, 2.0, 1.0], "float32"), jnp.array([1.0, 0.5, 2], "float32")


def capturing(name):
    """New arrays each time: what JAX keeps of them is of no other test."""
    rows, grid = np.array([0, 0, 1, 1, 2]), np.linspace(0.1, 1.0, 5)
    fns = {
        "scattered": lambda x, y: jnp.zeros_like(y).at[rows].add(jnp.sin(x)),
        "gathered": lambda x, y: x * y[rows],
        "multiplied": lambda x, y: jnp.sum(jnp.sin(x * grid.astype(x.dtype))) * y,
        "in a program": lambda x, y: jnp.tensordot(jnp.sin(x), grid, 1) * y,
        "in function and rule": lambda x, y: x * y[rows],
        "in the rule only": lambda x, y: x * jnp.repeat(y, 2)[:5],
    }
    fn = fns[name]
    if "rule" not in name:
        return fn
    rule = eqg.custom_vjp(fn)
    rule.def_fwd(lambda x, y: (fn(x, y), (x, y)))
    of_y = lambda y, ct: jnp.zeros_like(y).at[rows].add(ct)
    rule.def_bwd(lambda saved, ct: (ct * saved[1][rows], of_y(saved[1], ct * saved[0])))
    return rule


NAMES = ("scattered", "gathered", "multiplied", "in a program", "in function and rule")


@pytest.mark.parametrize(
    ("name", "is_compiled_before"),
    [*zip(NAMES, [False, True, False, True, True], strict=True), ("in the rule only", False)],
)
def test_captured_arrays(name, is_compiled_before):
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        fn = capturing(name)
        works = lambda: jax.jit(jax.grad(lambda x, y: jnp.sum(fn(x, y))))(XS, YS)
        if is_compiled_before:
            works()
        assert eqgt.check_gradients(lambda x, y: jnp.sum(fn(x, y) ** 2), XS, YS).passed
        works()


@pytest.mark.parametrize("array", [np.ones(3), np.arange(3)])
def test_captured_arrays_of_second_order(array):
    """A rule in whose derivative is a rule that captures an array. The user's function has its
    second derivative afterwards."""
    use = lambda t: t[array] if array.dtype == int else (t * array).astype(t.dtype)
    inner, outer = jax.custom_jvp(jnp.cos), jax.custom_jvp(jnp.sin)
    inner.defjvp(lambda p, t: (inner(*p), use(-jnp.sin(p[0]) * t[0])))
    outer.defjvp(lambda p, t: (outer(*p), inner(*p) * t[0]))
    with jax.numpy_dtype_promotion("standard"):
        eqgt.check_rule(outer, XS[:3], checks=("forward", "reverse", "order"))
        jax.jit(jax.hessian(lambda x: jnp.sum(outer(x))))(XS[:3])
