"""`check_rule` on derivatives that cancel along a random direction: a right rule passes at each
seed, and a wrong one fails at each.

The seeds are those of 2000 at which the terms of a sum, or of a product, cancel most.
"""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax.numpy as jnp
import pytest


WAVES = jnp.arange(1, 101, dtype="float32")
X = jnp.cos(WAVES**2)


def waves(factor=1.0):
    """Of one number: its cotangent is a sum of a hundred terms."""

    @eqg.custom_vjp
    def fn(s):
        return jnp.sin(s * WAVES)

    fn.def_fwd(lambda s: (jnp.sin(s * WAVES), s))
    fn.def_bwd(lambda s, ct: (factor * jnp.sum(ct * WAVES * jnp.cos(s * WAVES)),))
    return fn


def in_single(factor=1.0):
    """With derivatives that are rounded to float32, as those of a host function may be."""

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
        waves(factor), 0.7, checks=("reverse",), seed=SEEDS["reverse"], raises=False
    )
    found = [f for f in report["reverse"] if f.verdict == "FAILED"]
    assert len(found) == (0 if factor == 1 else len(SEEDS["reverse"])), report


@pytest.mark.parametrize("check", ["adjoint", "linear"])
def test_products_that_cancel(check):
    eqgt.check_rule(in_single(), X, checks=(check,), seed=SEEDS[check])


def test_modes_that_differ():
    seeds = range(20)
    wrong = in_single(1.01)
    report = eqgt.check_rule(wrong, X, checks=("adjoint",), seed=seeds, raises=False)
    assert len(report.failures) >= 19, report
