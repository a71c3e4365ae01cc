"""On the boundary of a mask, what the diagnoses say of a derivative that `zero_safe` drops."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest


X = jnp.array([0.5, 2.0, 5.0])


def box_cox(lam, x):
    """At `lam = 0`, the derivative is `log(x)**2 / 2`, and that of the branch is zero."""
    return jnp.where(lam == 0, jnp.log(x), (x**lam - 1) / lam)


def loss(lam):
    return jnp.sum(box_cox(lam, X))


def _sinc_of_norm(x):
    norm = eqg.safe.norm(x)
    return jnp.where(norm < 1e-6, 1.0, jnp.sin(norm) / norm)


ON_BOUNDARY = {
    "equal": loss,
    "not equal": lambda lam: jnp.sum(jnp.where(lam != 0, (X**lam - 1) / lam, jnp.log(X))),
    "greater": lambda lam: jnp.where(lam > 0, jnp.sin(lam) / lam, 0.0),
    "tolerance": lambda lam: jnp.where(jnp.abs(lam) > 1e-6, jnp.sin(lam) / lam, 1.0),
    "tolerance of a norm": lambda lam: _sinc_of_norm(jnp.full(3, lam)),
    "one element": lambda lam: jnp.sum(jnp.where(X + lam > 0.5, lam / (X + lam - 0.5), 0.0)),
    "one of two": lambda lam: jnp.where((lam == 0) | (X[0] < 0), 0.0, jnp.sin(lam) / lam),
    "not": lambda lam: jnp.where(~(lam == 0), jnp.sin(lam) / lam, 0.0),
    "an argument of `jit`": lambda lam: jax.jit(
        lambda ok, lam: jnp.sum(jnp.where(ok, jnp.log(X), (X**lam - 1) / lam))
    )(lam == 0, lam),
    "vmap": lambda lam: jnp.sum(jax.vmap(box_cox, (None, 0))(lam, X)),
    "scan": lambda lam: jax.lax.scan(lambda c, x: (c + box_cox(lam, x), None), 0.0 * lam, X)[0],
    "checkpoint": jax.checkpoint(loss),
}
ELSEWHERE = {
    "no tie": lambda lam: jnp.sum(jnp.where(X + lam > 0.6, lam / (X + lam - 0.5), 0.0)),
    "a direction": lambda lam: jnp.where(lam > 0, lam / jnp.sqrt(jnp.sum(lam**2)), 0.0),
    "infinite": lambda lam: jnp.where(lam > 0, jnp.sqrt(lam), 0.0),
    "no quotient": lambda lam: jnp.where(lam > 0, lam * jnp.log(lam), 0.0),
    "a pole": lambda lam: jnp.where(lam > 0, 1 / lam, 0.0),
    "a mask of data": lambda lam: jnp.sum(jnp.where(X == 0.5, 0.0, jnp.sqrt(lam * (X - 0.5)))),
    "a maximum": lambda lam: jax.nn.relu(jnp.sqrt(lam) - 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*ON_BOUNDARY, *ELSEWHERE])
def test_dead_branch_on_the_boundary(name):
    report = eqg.explain_nan({**ON_BOUNDARY, **ELSEWHERE}[name], jnp.array(0.0))
    dead = [record for record in report.found if record.kind == "dead branch"]
    assert dead
    for record in dead:
        assert ("check_gradients" in record.cure) == (name in ON_BOUNDARY)
        assert "expm1_ratio" not in record.cure


@pytest.mark.parametrize("above", [jnp.expm1, lambda x: jnp.exp(x) - 1])
def test_a_function_that_has_the_limit_is_named_for_its_quotient(above):
    loss = lambda lam: jnp.where(lam == 0, 1.0, above(lam) / lam)
    (record,) = eqg.explain_nan(loss, jnp.array(0.0)).found
    assert "`eqg.safe.expm1_ratio(x)` has the limit" in record.cure
    assert jnp.allclose(jax.grad(eqg.safe.expm1_ratio)(0.0), 0.5)


@pytest.mark.slow
def test_zero_safe_loses_a_derivative_and_all_say_so():
    safe, lam = eqg.zero_safe(loss), jnp.array(0.0)
    assert jax.grad(safe)(lam) == 0
    (record,) = eqg.explain_nan(safe, lam).dropped
    assert "0 / 0 on the boundary" in record.cure
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


NO_DIFFERENCE = {
    "booleans": lambda w, x: (x > 0) == (w * x > -1),
    "booleans of the model": lambda w, x: (w * x > 0) == (w * x > -1),
    "a given mask": lambda w, x: jnp.array([True, False]),
    "integers": lambda w, x: jnp.array([3, 0]) > 0,
    "unsigned integers": lambda w, x: jnp.array([3, 0], jnp.uint8) > 1,
    "complex numbers": lambda w, x: jax.lax.complex(x, 0 * x) != 0,
}


@pytest.mark.parametrize("around", [lambda f: f, eqg.zero_safe])
@pytest.mark.parametrize("name", NO_DIFFERENCE)
def test_a_mask_that_compares_no_numbers_of_the_model(name, around):
    x = jnp.array([2.0, 0.0])
    loss = around(lambda w: jnp.sum(jnp.where(NO_DIFFERENCE[name](w, x), w * (x / x), 0.0)))
    report = eqg.explain_nan(loss, jnp.array(1.0))
    (record,) = [*report.found, *report.dropped]
    assert (record.kind, record.primitive, record.index) == ("dead branch", "div", (1,))
    assert "on the boundary" not in record.cure
