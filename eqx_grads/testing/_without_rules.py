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

from .._diagnosis._programs.linear_solve import enter_also_solve, is_linear_solve
from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.structure import (
    CallWithRule,
    equations,
    inner_programs,
    primal_call,
    primal_program,
    structure,
)
from .._jaxprs.versions import given_solver, is_custom_root, rule_of_custom_call


_JAX = os.path.join(os.path.dirname(jax.__file__), "")
# Where JAX wraps the functions of others, as `jax.custom_gradient` does.
_WRAPPERS = os.path.join(_JAX, "_src", "custom_derivatives.py")


def without_rules(
    fn: Callable[..., Sequence[Any]], is_decorated: bool = False
) -> Callable[..., list[Any]]:
    """The same function of arrays, differentiated as it is written.

    `is_decorated`: whether `fn` is nothing but the call of a function that the user gave a
    rule, and which may otherwise look like one of JAX's own.
    """

    def undecorated(*arrays):
        program = jax.make_jaxpr(lambda *xs: list(fn(*xs)))(*arrays)
        return _evaluate(program, arrays, is_decorated)

    return undecorated


def _evaluate(
    program: ClosedJaxpr, args: Sequence[Any], is_decorated: bool = False
) -> list[Any]:
    def hook(eqn, values):
        known = structure(eqn)
        has_rule = known is None or isinstance(known, CallWithRule)
        has_rule = has_rule and primal_program(eqn) is not None
        call = primal_call(eqn)
        if call is not None and (is_rule(eqn) or (has_rule and is_decorated)):
            program, indices = call
            return without(program, [values[i] for i in indices], None)
        if has_rule:  # of JAX itself
            return bind(eqn, values)
        if any(_holds_rule(inner) for inner in inner_programs(eqn)):
            return enter_also_solve(eqn, values, without)
        return bind(eqn, values)

    without = lambda inner, values, _: _evaluate(inner, values)
    return evaluate(program, args, hook)


def _holds_rule(program: ClosedJaxpr) -> bool:
    return any(is_rule(eqn) for eqn in equations(program))


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
        # JAX has no `custom_root` of its own, and that of a batch is not the user's function.
        return not is_linear_solve(eqn) or not _is_written_in_jax(solver[0].jaxpr)
    primal = primal_program(eqn)
    return primal is not None and is_custom_root(primal)


def _is_written_in_jax(jaxpr) -> bool:
    source = _source(jaxpr)
    return _JAX in source and _WRAPPERS not in source


def _source(x) -> str:
    info = getattr(x, "debug_info", None)
    return str(getattr(info, "func_src_info", None))
