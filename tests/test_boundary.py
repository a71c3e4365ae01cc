"""On the boundary of a mask, what the diagnoses say of a derivative that `zero_safe` drops."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest


X = jnp.array([0.5, 2.0, 5.0])


def box_cox(lam, x):
    """At `lam = 0`, the derivative is `log(x)**2 / 2`, and the derivative of the branch is
    zero."""
    return jnp.where(lam == 0, jnp.log(x), (x**lam - 1) / lam)


def loss(lam):
    return jnp.sum(box_cox(lam, X))


@pytest.mark.slow
def test_zero_safe_loses_a_derivative_and_all_say_so():
    safe, lam = eqg.zero_safe(loss), jnp.array(0.0)
    assert jax.grad(safe)(lam) == 0
    (record,) = eqg.explain_nan(safe, lam).dropped
    assert record.kind == "dead branch"
    (record,) = eqg.explain_zero(safe, lam).found
    assert (record.leaf, record.kind) == ("model", "dropped by zero_safe")
    report = eqgt.check_gradients(safe, lam, raises=False)
    assert not report.passed
    assert any("`zero_safe` drops" in remark for remark in report.remarks)
    # As the cure says.
    mended = lambda lam: jnp.sum(jnp.log(X) * eqg.safe.expm1_ratio(lam * jnp.log(X)))
    assert jnp.allclose(mended(lam), loss(lam))
    assert jnp.allclose(jax.grad(mended)(lam), jnp.sum(jnp.log(X) ** 2) / 2)
    report = eqgt.check_gradients(mended, lam)
    assert report.passed
    assert not any("zero_safe" in remark for remark in report.remarks)


def test_only_the_leaf_that_zero_safe_makes_zero():
    model = {"lam": jnp.array(0.0), "scale": jnp.array(0.0), "shift": jnp.array(1.0)}

    def loss_of_two(model):
        scaled = jnp.where(model["scale"] == 0, model["scale"], jnp.sin(model["scale"]) ** 0.5)
        return loss(model["lam"]) + scaled + model["shift"]

    (record,) = eqg.explain_zero(eqg.zero_safe(loss_of_two), model).found
    assert (record.leaf, record.kind) == ("['lam']", "dropped by zero_safe")
