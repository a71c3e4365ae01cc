"""What `check_rule` says of functions with `implicit`: numbers of a wrong residual, and whose
tracers are kept."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest


def _residual(y, a):
    return y**3 + y - a


_KEPT = []


def _newton(a, is_kept=False):
    if is_kept:
        _KEPT.append(a + 1)
    step = lambda _, y: y - _residual(y, a) / (3 * y**2 + 1)
    return jax.lax.fori_loop(0, 40, step, jnp.ones_like(a))


def _pair(y, a):
    return jnp.stack([y[0] ** 3 + y[0] - a[0] + 0.1 * y[1], y[1] ** 3 + 2 * y[1] - a[1]])


@eqg.implicit(_pair)
def _newton_of_pair(a):
    a = jax.lax.stop_gradient(a)
    y = jnp.zeros_like(a)
    for _ in range(8):
        y = y - jnp.linalg.solve(jax.jacfwd(_pair)(y, a), _pair(y, a))
    return y


@pytest.mark.slow
def test_tracers_of_lineax_beside_a_solve_of_jax():
    eqgt.check_rule(_newton_of_pair, jnp.array([2.0, 1.0]), checks=("leaks",))


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_tracer_that_a_solver_keeps(is_kept):
    root = eqg.implicit(_residual)(lambda a: _newton(a, is_kept))
    with jax.check_tracer_leaks(False):
        report = eqgt.check_rule(root, jnp.array([2.0, 1.0]), checks=("leaks",), raises=False)
    _KEPT.clear()
    assert report.passed == (not is_kept)
    if is_kept:
        assert "keeps a tracer" in str(report)
