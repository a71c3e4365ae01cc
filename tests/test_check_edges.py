"""`check_rule` near the edge of where a function is defined: beyond it, a function raises an
error or is NaN, and finite differences are to keep inside.

The derivatives that are expected are formulas.
"""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads.testing._differences import directional


DERIVATIVES = ("forward", "reverse")


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def _square(x):
    if np.any(x > 1):
        raise ValueError("x is above one\nand this is more")
    return x**2


def _nan_above_one(x):
    return np.where(x > 1, np.nan, x**2)


def _alone(x):
    """At one point only."""
    if not np.array_equal(x, np.asarray([0.3, 0.5], x.dtype)):
        raise ValueError("x is another\nand this is more")
    return x**2


def _with_rule(fn, factor=1.0):
    f = eqg.host_function(fn, out=lambda x: x)

    @f.def_bwd
    def bwd(residuals, ct):
        return ((2 * factor * residuals[0] * ct).astype(ct.dtype),)

    @f.def_jvp
    def jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        return fn(x), (2 * factor * x * t).astype(x.dtype)

    return f


def _check(f, x, checks=DERIVATIVES):
    return eqgt.check_rule(f, x, order=1, checks=checks, raises=False)


@pytest.mark.parametrize("fn", [_square, _nan_above_one])
@pytest.mark.parametrize("edge", [0.99, 0.999999, 1.0])
def test_differences_keep_inside(fn, edge):
    x = jnp.array([0.3, edge])
    right, wrong = _check(_with_rule(fn), x), _check(_with_rule(fn, 1.001), x)
    assert [right[check][0].verdict for check in DERIVATIVES] == ["passed"] * 2
    assert [wrong[check][0].verdict for check in DERIVATIVES] == ["FAILED"] * 2
    assert "passed (seed" in str(right)


@pytest.mark.parametrize("rounded_to", [None, np.float32])
@pytest.mark.parametrize("edge", [0.98, 1.0])
@pytest.mark.parametrize("t", [0.5, -0.5])
def test_a_directional_derivative_near_an_edge(rounded_to, edge, t):
    dtype = rounded_to or np.float64
    fn = lambda x: [_square(x).astype(dtype)]
    (found,), *_ = directional(fn, [np.array([edge])], [np.array([t])], rounded_to)
    assert found == pytest.approx(2 * edge * t, rel=1e-4 if rounded_to else 1e-8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_reference_is_said(dtype, capfd):
    report = _check(_with_rule(_alone, 17.0), jnp.array([0.3, 0.5], dtype))
    assert report.passed
    first, *_ = str(report).splitlines()
    assert first == (
        "The rule of `_alone`: passed, without a reference for the derivative (seed 0)"
    )
    for check in DERIVATIVES:
        (finding,) = report[check]
        assert finding.verdict == "skipped"
        assert "the function raises ValueError at arguments that are moved by" in finding.text
        assert finding.text.endswith(": x is another")
    assert "Pure callbacks" not in str(report)
    assert "Traceback" not in capfd.readouterr().err


def test_a_function_that_is_not_finite_nearby():
    fn = lambda x: np.where(x == np.asarray([0.3, 0.5], x.dtype), x**2, np.nan)
    report = _check(_with_rule(fn), jnp.array([0.3, 0.5]))
    assert "the function is not finite at arguments close by" in str(report)
    assert "without a reference for the derivative (seed 0)" in str(report)


def test_an_infinite_slope_has_no_reference():
    f = eqg.host_function(np.sqrt, out=lambda x: x)
    f.def_bwd(lambda residuals, ct: (ct,))
    report = eqgt.check_rule(
        f, jnp.array([0.0, 0.9]), order=1, checks=("reverse",), raises=False
    )
    assert "not smooth here" in str(report)
    assert "without a reference for the derivative (seed 0)" in str(report)
