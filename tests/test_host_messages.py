"""Errors of host functions at the edge of a domain, of an `out` that needs a value, and what a
report says of differences."""

import math

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError


def _root(x):
    return np.asarray(math.sqrt(x), x.dtype)


@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
def test_differences_at_the_edge_of_a_domain(derivative):
    """NaN, or the exception of the function: it may be any mistake, and is not hidden."""
    like_x = {"out": lambda x: x, "finite_difference": "central"}
    nan = eqg.host_function(lambda x: np.where(x < 0, np.nan, x), **like_x)
    assert np.isnan(derivative(nan)(0.0))
    with pytest.raises(ValueError, match=r"domain|nonnegative") as caught:
        derivative(eqg.host_function(_root, **like_x))(0.0)
    notes = [note for note in caught.value.__notes__ if "smaller `step`" in note]
    assert len(notes) == 1
    assert "`_root` was called for a finite difference" in notes[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match="give a smaller `step`"):
        jax.jit(derivative(eqg.host_function(_root, **like_x)))(0.0)


def test_a_mistake_at_the_argument_itself_has_no_such_note():
    root = eqg.host_function(_root, out=lambda x: x, finite_difference="central")
    with pytest.raises(ValueError, match=r"domain|nonnegative") as caught:
        root(-1.0)
    assert not any("smaller `step`" in note for note in caught.value.__notes__)


def _full(x, n):
    return np.full(n, x)


@pytest.mark.parametrize(
    "out",
    [
        lambda x, n: jax.ShapeDtypeStruct((n,), x.dtype),
        lambda x, n: jax.ShapeDtypeStruct((int(n),), x.dtype),
        lambda x, n: jax.ShapeDtypeStruct(tuple(range(n)), x.dtype),
    ],
)
def test_a_shape_that_is_the_value_of_an_argument(out):
    full = eqg.host_function(_full, out=out)
    for call in (full, jax.jit(full)):
        with pytest.raises(RuleError, match=r"`out` of `_full`(.|\n)*static_argnums"):
            call(1.0, jnp.array(3))


@pytest.mark.parametrize("size", [lambda n: n, int])
def test_a_shape_that_is_a_traced_value(size):
    def run(x, n):
        out = lambda x, _: jax.ShapeDtypeStruct((size(n),), x.dtype)
        return eqg.host_function(_full, out=out)(x, 3)

    assert run(1.0, 3).shape == (3,)
    with pytest.raises(RuleError, match=r"`out` of `_full`(.|\n)*static_argnums"):
        jax.jit(run)(1.0, 3)
    assert jax.jit(run, static_argnums=1)(1.0, 3).shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3e-4, 1e-2])
def test_differences_are_less_precise_than_a_check_asks_for(step):
    with jax.enable_x64(True):
        f = eqg.host_function(
            lambda x: np.sin(x) * x, out=lambda x: x, finite_difference="central", step=step
        )
        checks = ("forward", "reverse", "order")
        report = eqgt.check_rule(f, jnp.array([0.7, 1.3]), checks=checks, raises=False)
    assert not report.passed
    is_first = any(f.check != "order" for f in report.failures)
    for failure in report.failures:
        assert (is_first and failure.check == "order") or "`tolerance=`" in failure.text


def _at_one(x):
    if np.any(x != 1):
        raise ValueError("x is another")
    return x**2


def _from_one(x):
    if np.any(x < 1):
        raise ValueError("x is below one")
    return x**2


@pytest.mark.slow
@pytest.mark.parametrize("fn", [_at_one, _from_one])
def test_transformations_at_the_edge_of_a_domain(fn):
    """The examples of the batch are moved less, or not at all."""
    f = eqg.host_function(fn, out=lambda x: x)
    f.def_bwd(lambda residuals, ct: (2 * residuals[0] * ct,))
    eqgt.check_rule(f, 1.0, checks=("transforms",))


@pytest.mark.slow
def test_the_log_does_not_repeat_what_the_report_says(caplog):
    f = eqg.host_function(_at_one, out=lambda x: x)
    f.def_bwd(lambda residuals, ct: (2 * residuals[0] * ct,))
    eqgt.check_rule(f, 1.0, checks=("transforms",))
    assert not caplog.records
