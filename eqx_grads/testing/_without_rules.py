"""The function without its rules, whose autodiff is the reference derivative.

Plain autodiff of the undecorated function gives the derivative that a rule should return, in
the user's dtype and without a step size. The function is traced, and every call with a rule in
its jaxpr, at any depth, is replaced by the primal computation. Rules of JAX itself
(`jax.nn.relu`) are kept. A solver that the user gave to `jax.lax.custom_linear_solve` or
`jax.lax.custom_root` is a function whose rule is the equation.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._jaxprs.evaluate import bind, enter, evaluate, Hook, Run
from .._jaxprs.structure import (
    CallWithRule,
    equations,
    inner_programs,
    primal_call,
    primal_program,
    structure,
)
from .._jaxprs.versions import as_closed, given_solver, is_custom_root, rule_of_custom_call


_JAX = os.path.join(os.path.dirname(jax.__file__), "")
# Where JAX wraps the functions of others, as `jax.custom_gradient` does.
_WRAPPERS = os.path.join(_JAX, "_src", "custom_derivatives.py")


def without_rules(
    fn: Callable[..., Sequence[Any]], is_decorated: bool = False
) -> Callable[..., list[Any]]:
    """The same function of arrays, differentiated as it is written.

    `is_decorated`: whether `fn` only calls a function that has a rule of the user. Without this
    flag, the function may look like one of JAX's own.
    """

    def without(eqn, values):
        call = primal_call(eqn)
        assert call is not None
        program, indices = call
        return replaced(program, [values[i] for i in indices], is_rule, without)

    is_call = lambda eqn: is_rule(eqn) or (is_decorated and primal_program(eqn) is not None)
    trace = jax.make_jaxpr(lambda *xs: list(fn(*xs)))
    return lambda *arrays: replaced(trace(*arrays), arrays, is_call, without)


def replaced(
    program: ClosedJaxpr, args: Any, is_replaced: Callable[[Any], bool], replacement: Hook
) -> list[Any]:
    """The outputs of a program in which some equations, at any depth, are replaced."""

    def hook(eqn, values):
        if is_replaced(eqn):
            return replacement(eqn, values)
        inner = [e for p in inner_programs(eqn) for e in equations(p)]
        if primal_program(eqn) is not None or not any(map(is_replaced, inner)):
            return bind(eqn, values)  # the rules of JAX are kept
        return (_enter_solve if _is_solve(eqn) else enter)(eqn, values, run)

    run = lambda inner, values, _: replaced(inner, values, is_replaced, replacement)
    return evaluate(program, args, hook)


def _is_solve(eqn: Any) -> bool:
    return eqn.primitive.name == "custom_linear_solve"


def _enter_solve(eqn: Any, values: Sequence[Any], run: Run) -> list[Any]:
    """As `enter`, for a `jax.lax.custom_linear_solve`, which is opaque to `structure`: its
    programs are a linear map, its transpose, and two solvers; a call runs one solver. Its
    derivative is still the derivative of the linear map."""
    jaxprs, values = eqn.params["jaxprs"], list(values)
    consts = [[values.pop(0) for _ in range(n)] for n in eqn.params["const_lengths"]]
    runs = lambda i: lambda x: list(run(as_closed(jaxprs[i]), [*consts[i], *x], None))

    def solves(i):
        with_aux = lambda out: (out[: len(values)], out[len(values) :])
        return lambda _, x: with_aux(runs(i)(x))

    x, aux = jax.lax.custom_linear_solve(
        runs(0), values, solves(2), None if jaxprs.transpose_solve is None else solves(3),
        symmetric=jaxprs.vecmat is jaxprs.matvec, has_aux=True,
    )  # fmt: skip
    return [*x, *aux]


def is_rule(eqn) -> bool:
    """Whether an equation is the call of a function to which the user gave a rule."""
    if eqn.primitive.name == "eqg_call" or has_given_solver(eqn):
        return True
    known = structure(eqn)
    primal = primal_program(eqn)
    if "_prim" in eqn.params and primal is not None:
        # With the flags `jax_custom_jvp3` and `jax_custom_vjp3`, the rule can't be seen.
        return not _is_written_in_jax(primal.jaxpr)
    if not isinstance(known, CallWithRule):
        return False
    # Not if both the function and its rule were written in JAX.
    program, rule = known.programs[0].jaxpr, rule_of_custom_call(eqn.params)
    return not (_is_written_in_jax(program) and _JAX in _source(rule))


def has_given_solver(eqn) -> bool:
    """Whether an equation is a `jax.lax.custom_linear_solve` or a `jax.lax.custom_root`, with a
    solver of the user's."""
    solver = given_solver(eqn)
    if solver is not None:
        # JAX itself never calls `custom_root`, and in a batch its function is not the user's.
        return not _is_solve(eqn) or not _is_written_in_jax(solver[0].jaxpr)
    primal = primal_program(eqn)
    return primal is not None and is_custom_root(primal)


def _is_written_in_jax(jaxpr) -> bool:
    source = _source(jaxpr)
    return _JAX in source and _WRAPPERS not in source


def _source(x) -> str:
    info = getattr(x, "debug_info", None)
    return str(getattr(info, "func_src_info", None))
