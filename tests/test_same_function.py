"""Functions that are another function in float64: random draws, branches on a dtype."""

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


def _dropout(key, x):
    return eqx.nn.Dropout(0.5)(jnp.ones_like(x), key=key)


DRAWS = {
    "bernoulli": lambda key, x: jr.bernoulli(key, 0.5, x.shape).astype(x.dtype),
    "normal": lambda key, x: jr.normal(key, x.shape, x.dtype),
    "dropout": _dropout,
}


def _reverse(draw, factor):
    @eqg.custom_vjp
    def fn(x, key):
        return draw(key, x) * jnp.sin(x)

    fn.def_fwd(lambda x, key: (fn(x, key), (x, key)))
    fn.def_bwd(lambda saved, ct: (factor * ct * _slope(draw, *saved), None))
    return fn


def _forward(draw, factor):
    @eqg.custom_jvp
    def fn(x, key):
        return draw(key, x) * jnp.sin(x)

    fn.def_jvp(lambda p, t: (fn(*p), factor * _slope(draw, *p) * t[0]))
    return fn


def _slope(draw, x, key):
    return draw(key, x) * jnp.cos(x)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [_forward, _reverse])
@pytest.mark.parametrize(
    # Those for which float64 draws zeros only, and the user's precision does not; another one.
    ("name", "seed"),
    [("bernoulli", 3), ("dropout", 6), ("normal", 0)],
)
def test_a_factor_in_the_rule_of_a_random_function(rule, name, seed):
    draw, key = DRAWS[name], jr.key(seed)
    right = eqgt.check_rule(rule(draw, 1.0), X, key, checks=CHECKS)
    assert all(f.tolerance <= 1e-4 for f in right.findings if f.tolerance is not None)
    wrong = eqgt.check_rule(rule(draw, 7.0), X, key, checks=CHECKS, raises=False)
    is_zero = not np.any(draw(key, X))
    assert wrong.passed == is_zero


def _with_slope(fn, slope):
    rule = eqg.custom_jvp(fn)
    rule.def_jvp(lambda p, t: (rule(*p), slope(*p) * t[0]))
    return rule


def _sin_in_single(x):
    return jnp.sin(x) if x.dtype == jnp.float32 else x**2


def test_a_branch_on_the_dtype():
    eqgt.check_rule(_with_slope(_sin_in_single, jnp.cos), X, checks=CHECKS)
    report = eqgt.check_rule(
        _with_slope(_sin_in_single, lambda x: 2 * x), X, checks=CHECKS, raises=False
    )
    assert {failure.check for failure in report.failures} == {"forward", "reverse"}


def test_a_reference_that_is_another_function_in_float64():
    rule = _with_slope(lambda x: jnp.round(x), jnp.cos)
    eqgt.check_rule(rule, X, checks=CHECKS, reference=_sin_in_single)
    rule = _with_slope(lambda x: jnp.round(x), lambda x: 2 * x)
    report = eqgt.check_rule(rule, X, checks=CHECKS, reference=_sin_in_single, raises=False)
    assert "reverse" in {failure.check for failure in report.failures}


def test_a_constant_of_the_dtype_makes_no_other_function():
    """It is compared with the tolerance of float64."""
    norm = lambda x: x / (jnp.sqrt(jnp.sum(x**2)) + jnp.finfo(x.dtype).eps)
    report = eqgt.check_rule(norm, X, checks="forward")
    assert report["forward"][0].tolerance <= 1e-5


def _rounded(x, size):
    large = size * jnp.cos(0 * x)  # a constant is canceled by XLA
    return (x + large) - large


@pytest.mark.thorough
def test_rounding_never_explains_an_error_as_large_as_the_derivative():
    """In single precision, plain autodiff is off by a fifth here, and a right rule as well."""
    x, square = jnp.float32(2.5e-3), lambda x: _rounded(x, 2e4) ** 2
    right = _with_slope(square, lambda x: 2 * _rounded(x, 1.1e4))
    report = eqgt.check_rule(right, x, checks=CHECKS)
    assert any("rounding changes plain autodiff" in f.text for f in report["forward"])
    assert max(f.tolerance for f in report.findings if f.tolerance is not None) <= 0.1
    factor = lambda x: 7.0 if x.dtype == jnp.float32 else 1.0
    wrong = _with_slope(square, lambda x: 2 * factor(x) * x)
    report = eqgt.check_rule(wrong, x, checks=CHECKS, raises=False)
    assert not report.passed


class Model(eqx.Module):
    w: jax.Array
    rule: object = eqx.field(static=True)

    def loss(self, key):
        return jnp.sum(self.rule(self.w, key))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [3, 6])
def test_the_gradient_of_a_random_loss(seed):
    """In float64, all of the numbers that are drawn are zero."""
    draw, key = DRAWS["bernoulli"], jr.key(seed)
    report = eqgt.check_gradients(Model.loss, Model(X, _reverse(draw, 1.0)), key)
    is_zero = not np.any(draw(key, X))
    assert [leaf.verdict for leaf in report.leaves] == ["zero" if is_zero else "right"]
    if not conds_keep_keys():
        return
    wrong = Model(X, _reverse(draw, 7.0))
    report = eqgt.check_gradients(Model.loss, wrong, key, raises=False)
    assert report.passed == is_zero


# ---------------------------------------------------------------- cancellation


WAVES = jnp.arange(1, 101, dtype="float32")
X_OF_CANCELLATION = jnp.cos(WAVES**2)


def waves(factor=1.0):
    """Of one number: its cotangent is a sum of a hundred terms."""

    @eqg.custom_vjp
    def fn(s):
        return jnp.sin(s * WAVES)

    fn.def_fwd(lambda s: (jnp.sin(s * WAVES), s))
    fn.def_bwd(lambda s, ct: (factor * jnp.sum(ct * WAVES * jnp.cos(s * WAVES)),))
    return fn


def in_single(factor=1.0):
    """With derivatives that are rounded to float32, as a host function may round them."""

    def derivative(x):
        return (jnp.cos(x) + x).astype("float32")

    def value(x):
        return jnp.sum(jnp.sin(x) + x**2 / 2)

    fn = eqg.custom_vjp(value)

    @fn.def_jvp
    def jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        t_out = jnp.sum((derivative(x) * t).astype("float32"))
        return value(x), t_out.astype(value(x).dtype)

    fn.def_fwd(lambda x: (value(x), x))

    @fn.def_bwd
    def bwd(x, ct):
        return ((factor * derivative(x) * ct.astype("float32")).astype(x.dtype),)

    return fn


SEEDS = {"reverse": [946], "adjoint": [27, 361, 727], "linear": [108, 120, 329]}


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_cotangent_that_is_a_sum(factor):
    report = eqgt.check_rule(
        waves(factor),
        jnp.float32(0.7),
        checks=("reverse",),
        seed=SEEDS["reverse"],
        raises=False,
    )
    found = [f for f in report["reverse"] if f.verdict == "FAILED"]
    assert len(found) == (0 if factor == 1 else len(SEEDS["reverse"])), report


@pytest.mark.parametrize("check", ["adjoint", "linear"])
def test_products_that_cancel(check):
    eqgt.check_rule(in_single(), X_OF_CANCELLATION, checks=(check,), seed=SEEDS[check])


def test_modes_that_differ():
    seeds = range(20)
    wrong, x = in_single(1.01), X_OF_CANCELLATION
    report = eqgt.check_rule(wrong, x, checks=("adjoint",), seed=seeds, raises=False)
    assert len(report.failures) >= 19, report
