"""Solvers that are given to JAX (`custom_linear_solve`, `custom_root`), under the checkers.

They have the derivative of an equation, and may not have its solution.
"""

import pathlib

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


MATRIX = jnp.array([[3.0, 1.0], [0.5, 2.0]], "float32")
SIDE = jnp.array([1.0, 2.0], "float32")
CHECKS = ("primal", "forward", "reverse")


def failure(loss, *args):
    """The report of a gradient that is wrong."""
    report = eqgt.check_gradients(loss, *args, raises=False)
    assert not report.passed
    return " ".join(str(report).split())


@eqg.host_function(out=lambda matrix, side: side)
def _on_host(matrix, side):
    return np.linalg.solve(matrix, side)


def _linear(solver, factor):
    """The matrix of the equation is `factor` times the matrix of the solver."""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_solver_of_another_equation_is_wrong(name):
    make, args = CASES[name]
    eqgt.check_rule(make(1.0), *args, checks=CHECKS)
    with pytest.raises(eqgt.RuleCheckError, match=r"1. forward(?s:.*)relative error (1|0.3)"):
        eqgt.check_rule(make(2.0), *args, checks=CHECKS)
    loss = lambda solve: lambda *args: jnp.sum(solve(*args) ** 2)
    eqgt.check_gradients(loss(make(1.0)), *args)
    text = "derivative of a solver is wrong if it solves another equation"
    assert text in failure(loss(make(2.0)), *args)


def _square(factor):
    """`A A' x`, whose cotangent in `A` is wrong if `factor` is not one."""

    @eqg.custom_vjp
    def operator(matrix, x):
        return matrix @ (matrix.T @ x)

    @operator.def_fwd
    def operator_fwd(matrix, x):
        return operator(matrix, x), (matrix, x)

    @operator.def_bwd
    def operator_bwd(residuals, ct):
        matrix, x = residuals
        of_matrix = jnp.outer(ct, matrix.T @ x) + jnp.outer(x, matrix.T @ ct)
        return factor * of_matrix, matrix @ (matrix.T @ ct)

    def solve(matrix, side):
        return jax.scipy.sparse.linalg.cg(lambda x: operator(matrix, x), side, tol=1e-10)[0]

    return solve


@pytest.mark.slow
def test_a_rule_inside_the_operator_of_a_solver():
    eqgt.check_rule(_square(1.0), MATRIX, SIDE, checks=CHECKS)
    with pytest.raises(eqgt.RuleCheckError, match="twice the expected one"):
        eqgt.check_rule(_square(2.0), MATRIX, SIDE, checks=CHECKS)
    text = failure(lambda matrix: jnp.sum(_square(2.0)(matrix, SIDE) ** 2), MATRIX)
    assert "The gradient is right without the rule of `operator`" in text


@pytest.mark.slow
def test_a_wrong_rule_after_a_solver_of_lineax():
    """One operand of its primitive has no derivative, the others have one."""
    lineax = pytest.importorskip("lineax")
    twice = _by_custom_gradient()

    def loss(matrix):
        operator = lineax.MatrixLinearOperator(matrix)
        return jnp.sum(twice(lineax.linear_solve(operator, SIDE.astype(matrix.dtype)).value))

    assert "The gradient is right without the rule of" in failure(loss, MATRIX)


# ---------------------------------------------------------------- whose rule is it?


RULE = """
activation = jax.custom_jvp(jnp.sin)
activation.defjvp(lambda primals, ts: (activation(*primals), 2 * jnp.cos(primals[0]) * ts[0]))
"""


def _of_a_package_called_like_jax():
    site = pathlib.Path(jax.__file__).parents[1]
    names = {"jax": jax, "jnp": jnp}
    exec(compile(RULE, str(site / "jaxley" / "rules.py"), "exec"), names)
    return names["activation"]


def _by_custom_gradient():
    return jax.custom_gradient(lambda x: (jnp.sin(x), lambda ct: 2 * jnp.cos(x) * ct))


@pytest.mark.parametrize("make", [_of_a_package_called_like_jax, _by_custom_gradient])
def test_rules_that_look_like_those_of_jax(make):
    activation, x = make(), jnp.array([0.5, 0.3], "float32")
    with pytest.raises(eqgt.RuleCheckError, match="twice the expected one"):
        eqgt.check_rule(lambda x: 3 * activation(x), x, checks=("primal", "reverse"))
    text = failure(lambda x: jnp.sum(activation(x)), x)
    assert "The gradient is right without the rule of" in text
