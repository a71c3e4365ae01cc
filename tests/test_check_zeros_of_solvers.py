"""The check `zeros` of `implicit` functions whose residual calls a function of JAX with a rule
of its own, which computes the terms of constants too."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize


X = np.random.default_rng(0).normal(size=(6, 2))
Y = np.array([1.0, 0, 1, 1, 0, 1])


def _objective(w, lam, x, m=jnp):
    z = x @ w
    return m.sum(m.logaddexp(0.0, z) - m.asarray(Y) * z) + 0.5 * lam * m.sum(w**2)


def _fit():
    solve = lambda lam, x: (
        minimize(lambda w: _objective(w, lam, x, np), np.zeros(2), tol=1e-10).x
    )
    on_host = eqg.host_function(
        solve, out=lambda lam, x: jax.ShapeDtypeStruct((x.shape[1],), x.dtype)
    )
    return eqg.implicit(jax.grad(_objective))(on_host)


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_residual_with_logaddexp(is_inside):
    with jax.enable_x64(True):
        fit = _fit()
        fn = (lambda lam, x: 2 * fit(lam, x)) if is_inside else fit
        eqgt.check_rule(fn, 1.1, jnp.asarray(X), checks=("zeros",))


@pytest.mark.slow
def test_a_rule_of_the_user_s_next_to_a_solver_is_seen():
    @eqg.custom_jvp
    def scale(lam, x):
        return jnp.sin(lam) * x

    @scale.def_jvp(symbolic_zeros=True)
    def scale_jvp(primals, tangents):
        lam, x = primals
        t_lam, t_x = eqg.tangents.materialize(primals, tangents)
        return scale(lam, x), jnp.cos(lam) * x * t_lam + jnp.sin(lam) * t_x

    with jax.enable_x64(True):
        fit = _fit()
        fn = lambda lam, x: fit(1.0, scale(lam, x))
        report = eqgt.check_rule(fn, 1.1, jnp.asarray(X), checks=("zeros",), raises=False)
        assert not report.passed
        assert "some belong to leaves that are not perturbed" in str(report)
