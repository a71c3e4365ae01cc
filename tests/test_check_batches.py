"""`check_rule` finds rules that mix the examples of a batch, also where the function has a
narrow domain, and takes what raises elsewhere for a fault of the rule, not of the function."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads.testing._report import PASSED


ONE = jnp.ones((), "float32")


def host_function(fn, bwd):
    decorated = eqg.host_function(fn, out=lambda x: x, vmap_method="broadcast_all")
    decorated.def_bwd(bwd)
    return decorated


def failures(fn, *args):
    report = eqgt.check_rule(fn, *args, checks=("transforms",), raises=False)
    return [finding.where for finding in report["transforms"] if finding.verdict != PASSED]


def of_batch(x, mixed):
    return np.broadcast_to(mixed(x), x.shape).astype(x.dtype) if x.ndim else x


MIXED = {
    "right": lambda x: x,
    "rolled": lambda x: np.roll(x, 1, axis=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("width", [0.0, 1.0])
def test_cotangents_are_mixed(mixed, width):
    """Each example has a cotangent of its own, also if there is one argument only at which the
    function is defined."""

    def square(x):
        if np.any(np.abs(x - 1) > width):
            raise ValueError("outside of the domain")
        return np.asarray(x**2)

    fn = host_function(square, lambda r, ct: (of_batch(2 * r[0] * ct, MIXED[mixed]),))
    found = failures(fn, ONE)
    assert bool(found) == (mixed != "right"), found
    assert all(("equal examples" in where) == (width == 0) for where in found)


@pytest.mark.slow
def test_a_rule_that_raises_at_other_arguments():
    def bwd(residuals, ct):
        if residuals[0] != 1:
            raise ValueError("not this one")
        return (2 * residuals[0] * ct,)

    report = eqgt.check_rule(
        host_function(lambda x: np.asarray(x**2), bwd),
        ONE,
        checks=("transforms",),
        raises=False,
    )
    assert any("vmap" in f.where and f.raised for f in report.failures), report
    assert "raises at other arguments, where the function does not" in str(report)
