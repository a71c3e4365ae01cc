"""Solvers that are given to JAX (`custom_linear_solve`, `custom_root`), under the checkers.

Their derivative is that of an equation, of which they may not have the solution.
"""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


MATRIX = jnp.array([[3.0, 1.0], [0.5, 2.0]], "float32")
SIDE = jnp.array([1.0, 2.0], "float32")


@eqg.host_function(out=lambda matrix, side: side)
def _on_host(matrix, side):
    return np.linalg.solve(matrix, side)


def _linear(solver, factor):
    """The matrix of the equation is `factor` times that of the solver."""

    def solve(matrix, side):
        return jax.lax.custom_linear_solve(
            lambda x: factor * matrix @ x,
            side,
            solve=lambda _, side: solver(matrix, side),
            transpose_solve=lambda _, side: solver(matrix.T, side),
        )

    return solve


def _root(factor):
    def root(a):
        def newton(_, y):
            return jax.lax.fori_loop(0, 20, lambda _, y: (y + a / y) / 2, y)

        return jax.lax.custom_root(
            lambda y: y**2 - factor * a, a, newton, lambda g, y: y / g(jnp.ones_like(y))
        )

    return root


CASES = {
    "host": (lambda factor: _linear(_on_host, factor), (MATRIX, SIDE)),
    "jax": (lambda factor: _linear(jnp.linalg.solve, factor), (MATRIX, SIDE)),
    "root": (_root, (jnp.array(2.3, "float32"),)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_solver_of_another_equation_is_wrong(name):
    make, args = CASES[name]
    checks = ("primal", "forward", "reverse")
    eqgt.check_rule(make(1.0), *args, checks=checks)
    with pytest.raises(eqgt.RuleCheckError, match=r"relative error 1, admitted 1e-0"):
        eqgt.check_rule(make(2.0), *args, checks=checks)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_through_such_a_solver(name):
    make, args = CASES[name]
    loss = lambda solve: lambda *args: jnp.sum(solve(*args) ** 2)
    eqgt.check_gradients(loss(make(1.0)), *args)
    report = eqgt.check_gradients(loss(make(2.0)), *args, raises=False)
    assert not report.passed
    text = " ".join(str(report).split())
    assert "The derivative of the solver at test_given_solvers.py:" in text
    assert "is that of the equation that it is given, and is wrong if it solves another" in text


def test_the_solvers_of_jax_keep_their_derivative():
    """They solve the equation that they are given."""

    def ridge(matrix, side):
        matrix = matrix @ matrix.T
        return jax.scipy.sparse.linalg.cg(matrix, side, tol=1e-12)[0]

    eqgt.check_rule(ridge, MATRIX, SIDE, checks=("primal", "forward", "reverse"))


# ---------------------------------------------------------------- methods and Modules


class Scale(eqx.Module):
    weight: jax.Array

    def plain(self, x):
        return self.weight * x

    @eqg.custom_vjp
    def __call__(self, x):
        return self.weight * x

    @__call__.def_fwd
    def _call_fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _call_bwd(residuals, ct):
        self, x = residuals
        return eqg.tangents.of(self, weight=ct * x), ct * self.weight

    @eqg.custom_vjp
    def forgets_itself(self, x):
        return self.weight * x

    @forgets_itself.def_fwd
    def _forgets_fwd(self, x):
        return self.forgets_itself(x), (self, x)

    @forgets_itself.def_bwd
    def _forgets_bwd(residuals, ct):
        self, _ = residuals
        return None, ct * self.weight


SCALE, X = Scale(jnp.array(2.0, "float32")), jnp.array(3.0, "float32")
EXPECTED = {
    "method as the reference": lambda: {"reference": SCALE.plain},
    "formula of cotangents": lambda: {
        "expected_cotangent": lambda primals, ct: (
            Scale(ct * primals[1]),
            ct * primals[0].weight,
        )
    },
    "formula of tangents": lambda: {
        "expected_tangent": lambda primals, ts: (
            ts[0].weight * primals[1] + primals[0].weight * ts[1]
        )
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_expected_derivative_of_a_method_is_that_of_its_module_too(name):
    options = {"checks": ("forward", "reverse"), **EXPECTED[name]()}
    eqgt.check_rule(SCALE, X, **options)
    with pytest.raises(eqgt.RuleCheckError, match=r"self\.weight"):
        eqgt.check_rule(SCALE.forgets_itself, X, **options)


def test_a_reference_that_does_not_have_the_arrays_of_the_module():
    with pytest.raises(eqg.RuleError, match=r"is not a function of `self\.weight`") as error:
        eqgt.check_rule(SCALE, X, reference=lambda x: 2 * x)
    assert "check `lambda x: layer(x)`" in str(error.value)
    eqgt.check_rule(lambda x: SCALE(x), X, checks="reverse", reference=lambda x: 2 * x)


def test_numbers_of_a_module_are_static_where_a_reference_is_given():
    eqgt.check_rule(eqg.nn.GradientScale(3.0), X, checks="reverse", reference=lambda x: 3 * x)


def test_a_formula_with_another_number_of_cotangents():
    formula = lambda primals, ct: (ct * primals[0].weight,)
    with pytest.raises(eqgt.RuleCheckError, match="a cotangent for each argument") as error:
        eqgt.check_rule(SCALE, X, checks="reverse", expected_cotangent=formula)
    assert "1 for" in str(error.value)
    assert "`self`, `x`" in str(error.value)


# ---------------------------------------------------------------- one mode is asked for


def _half(derivative):
    rule = eqg.custom_vjp(lambda x: derivative * x)
    rule.def_fwd(lambda x: (derivative * x, None))
    rule.def_bwd(lambda _, ct: (0.5 * ct,))
    return rule


def test_modes_that_are_meant_to_differ_are_not_adjoint():
    """Forward mode is that of the function, as in every `custom_vjp` of this library."""
    options = {"expected_cotangent": lambda primals, ct: (0.5 * ct,)}
    report = eqgt.check_rule(_half(1.0), jnp.ones(3), **options)
    assert [finding.verdict for finding in report["adjoint"]] == ["skipped"]
    report = eqgt.check_rule(_half(0.5), jnp.ones(3), **options)
    assert {finding.verdict for finding in report["adjoint"]} == {"passed"}
    report = eqgt.check_rule(_half(1.0), jnp.ones(3), checks="adjoint", raises=False)
    assert not report.passed


def test_arguments_that_are_not_perturbed_are_no_residuals():
    x, n = jnp.ones(6, "float32"), jnp.arange(6, dtype="float32")
    report = eqgt.check_residuals(lambda x, n: x * n, x, n, nondifferentiable=("n",))
    assert report["residuals"][0].where.startswith("0 bytes per call")
    report = eqgt.check_residuals(lambda x, n: x * jnp.sin(n), x, n, nondifferentiable=("n",))
    assert report["residuals"][0].where.startswith("24 bytes per call")
