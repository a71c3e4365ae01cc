"""Fixed points. The approximate derivatives are wrong on purpose: each case says how."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import optimistix as optx
from eqx_grads import solvers

from .registry import case


# In single precision, this leaves an error of about 1e-7 times the condition of the problem.
TOLERANCE = 1e-7


def _cell(z, x):
    weight = jnp.array([[0.3, -0.2, 0.1], [0.0, 0.25, 0.2], [-0.15, 0.1, 0.3]], x.dtype)
    return jnp.tanh(weight @ z + x)


def _fixed_point(x, *, backward):
    tolerance = TOLERANCE if x.dtype == jnp.float32 else 1e-14
    solver = optx.FixedPointIteration(rtol=tolerance, atol=tolerance)
    if backward == "fixed_point":
        backward = solvers.FixedPointAdjoint(solver)
    return eqg.fixed_point(_cell, jnp.zeros_like(x), x, solver=solver, backward=backward).value


def _steps(x):
    step = lambda z, _: (_cell(z, x), None)
    return jax.lax.scan(step, jnp.zeros_like(x), None, length=60)[0]


def _steps_from_there(number, tau, x):
    z = jax.lax.stop_gradient(_steps(x))
    for _ in range(number):
        z = (1 - tau) * z + tau * _cell(z, x)
    return z


# Without its rule, the solution has no derivative. The steps written out have the right one.
# Where the derivative is approximate, so is that of the fixed point in the second derivative,
# which is not that of any steps: `tests/test_fixed_point.py` has it.
@case("fixed_point", reference=_steps)
def _():
    return ft.partial(_fixed_point, backward="implicit"), (jnp.array([0.5, -1.2, 2.0]),)


@case("fixed_point: iterated backward", reference=_steps)
def _():
    return ft.partial(_fixed_point, backward="fixed_point"), (jnp.array([0.5, -1.2, 2.0]),)


@case("fixed_point: neumann", reference=ft.partial(_steps_from_there, 3, 1.0), order=1)
def _():
    backward = solvers.NeumannAdjoint(2)
    return ft.partial(_fixed_point, backward=backward), (jnp.array([0.5, -1.2, 2.0]),)


@case("fixed_point: phantom", reference=ft.partial(_steps_from_there, 3, 0.5), order=1)
def _():
    backward = solvers.PhantomAdjoint(3, 0.5)
    return ft.partial(_fixed_point, backward=backward), (jnp.array([0.5, -1.2, 2.0]),)


@case("fixed_point: one step", reference=ft.partial(_steps_from_there, 1, 1.0), order=1)
def _():
    return ft.partial(_fixed_point, backward="one_step"), (jnp.array([0.5, -1.2, 2.0]),)


@case("nn.FixedPoint", reference=_steps)
def _():
    layer = eqg.nn.FixedPoint(lambda x, z: _cell(z, x), 3, backward="implicit")
    return layer, (jnp.array([0.5, -1.2, 2.0]),)
