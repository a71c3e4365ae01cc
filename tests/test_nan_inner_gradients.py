"""`explain_nan` of a loss with a gradient inside, such as the gradient of an energy."""

import inspect

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest


def _force_matching(energy):
    return lambda q, x: jnp.sum(jax.grad(energy, 1)(q, x) ** 2)


def _pair_energy(q, x, mask):
    r = jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, -1))  # NORM
    pair = q[:, None] * q[None] / r  # PAIR
    return jnp.sum(jnp.where(mask, 0.0, pair))  # MASK


def _at(fn, mark):
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if f"# {mark}" in line)


def _second(norm):
    """The trace of the second derivative of a smooth function of the norm, at zero: 4 s**2."""
    return lambda s: jnp.trace(jax.hessian(lambda x: norm(s * x) ** 2)(jnp.zeros(2)))


@pytest.mark.slow
def test_a_safe_function_has_no_second_derivative_at_its_kink():
    """`safe.norm` alone would make a smooth second derivative zero; it is NaN, with a cure."""
    s = jnp.array(2.0)
    report = eqg.explain_nan(_second(jnp.linalg.norm), s)
    # One of four operations of one square root. (JAX 0.10.0 may place another one elsewhere.)
    assert len(report.found) <= 2
    assert (report.found[0].primitive, report.found[0].derivative_of) == ("div", "sqrt")
    assert all("is smooth there, compute it without" in r.cure for r in report.found)
    assert jnp.isnan(_second(eqg.safe.norm)(s))  # as it says
    squares = lambda s: jnp.trace(jax.hessian(lambda x: jnp.sum((s * x) ** 2))(jnp.zeros(2)))
    assert squares(s) == 4 * s**2  # as it says
    assert not eqg.explain_nan(squares, s)
    (record,) = eqg.explain_nan(lambda x: jnp.linalg.norm(x), jnp.zeros(2)).found
    assert "in a derivative" not in record.cure


@pytest.mark.slow
def test_the_cure_of_a_second_derivative_of_a_safe_function():
    """In the value of the loss, in its gradient, and behind a mask."""
    distances = lambda x: eqg.safe.pairwise_distance(x, x + 0)
    masked = lambda x: jnp.where(x > 0, eqg.safe.sqrt(x), 0.0)
    losses = {
        "safe.norm": (_second(eqg.safe.norm), jnp.array(2.0)),
        "safe.pairwise_distance": (_force(distances), jnp.ones((2, 2))),
        "safe.sqrt": (_force(masked), jnp.array([0.0, 1.0])),
    }
    for name, (loss, x) in losses.items():
        records = eqg.explain_nan(loss, x).found
        assert records
        for record in records:
            assert f"`{name}`" in record.cure
            assert f"eqg.{name}" not in record.cure  # which is what the loss has
            assert "It is in a derivative that the loss takes" in record.cure
    cured = lambda x: eqg.safe.where(x > 0, eqg.safe.sqrt, x, 0.0)  # as it says
    for energy in (cured, eqg.zero_safe(masked)):
        gradient = jax.grad(_force(energy))(jnp.array([0.0, 1.0]))
        assert jnp.array_equal(gradient, jax.grad(_force(cured))(jnp.array([0.0, 1.0])))
        assert jnp.isfinite(gradient).all()


def _force(energy):
    return lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(energy(x) ** 2 + energy(x)))(x) ** 2)


CHARGES = jnp.array([1.0, 2.0, 3.0])
POSITIONS = jnp.array([[0.0, 1.0], [2.0, 0.5], [-1.0, 3.0]])


@pytest.mark.slow
def test_a_dead_branch_in_a_gradient_inside_of_the_loss():
    """The energy is finite, and the force is NaN: to the loss, that is a value."""
    energy = lambda q, x: _pair_energy(q, x, jnp.eye(3) > 0)
    fixed = _force_matching(eqg.zero_safe(energy, policy="zero"))
    assert jnp.all(jnp.isfinite(jax.grad(fixed)(CHARGES, POSITIONS)))
    report = eqg.explain_nan(_force_matching(energy), CHARGES, POSITIONS)
    lines = {_at(_pair_energy, "NORM"), _at(_pair_energy, "PAIR")}
    assert {r.line for r in report.found} <= lines
    values = [r for r in report.found if r.is_forward]
    assert values
    assert not any("zero_safe(loss)" in r.cure for r in report.found)  # it leaves the loss NaN
    assert all('eqg.zero_safe(f, policy="zero")' in r.cure for r in values)


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_a_singularity_in_a_gradient_inside_of_the_loss(is_elsewhere):
    """It is not a dead branch if it is also used elsewhere, or at other elements."""
    mask = jnp.eye(3) > 0
    if is_elsewhere:
        energy = lambda q, x: (
            _pair_energy(q, x, mask) + _pair_energy(q, x, jnp.zeros((3, 3), bool))
        )
        positions = POSITIONS
    else:
        energy = lambda q, x: _pair_energy(q, x, mask)
        positions = POSITIONS.at[1].set(POSITIONS[0])
    report = eqg.explain_nan(_force_matching(energy), CHARGES, positions)
    assert "true singularity" in {r.kind for r in report.found}
