"""The function without its rules: the exact witness that every rule has at hand.

A JAX function can always be differentiated as it is written, so plain autodiff of the
undecorated function says what a rule should return, in the user's own dtype, and without a
step size. The function is traced, and every call with a rule in its jaxpr is replaced by what
the call computes, however deep it is. Rules of JAX itself (`jax.nn.relu`) are left alone.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import CallWithRule, equations, inner_programs, structure
from .._jaxprs.versions import rule_of_custom_call


_JAX = str(pathlib.Path(jax.__file__).parent)


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


def has_rules(fn: Callable[..., Sequence[Any]], *arrays: Any) -> bool:
    """Whether a rule of the user's is at work anywhere in `fn`."""
    return _holds_rule(jax.make_jaxpr(lambda *xs: list(fn(*xs)))(*arrays))


def _evaluate(
    program: ClosedJaxpr, args: Sequence[Any], is_decorated: bool = False
) -> list[Any]:
    def hook(eqn, values):
        has_rule = isinstance(structure(eqn), CallWithRule)
        if eqn.primitive.name == "eqg_call" and not has_rule:
            return without_rules(eqn.params["call"].primal)(*values)
        if _is_rule(eqn) or (has_rule and is_decorated):
            return enter(eqn, values, without)
        if has_rule:  # of JAX itself
            return bind(eqn, values)
        if any(_holds_rule(inner) for inner in inner_programs(eqn)):
            return enter(eqn, values, without)
        return bind(eqn, values)

    without = lambda inner, values, _: _evaluate(inner, values)
    return evaluate(program, args, hook)


def _holds_rule(program: ClosedJaxpr) -> bool:
    return any(_is_rule(eqn) for eqn in equations(program))


def _is_rule(eqn) -> bool:
    """Whether an equation is the call of a function to which the user gave a rule."""
    if eqn.primitive.name == "eqg_call":
        return True
    known = structure(eqn)
    if not isinstance(known, CallWithRule):
        return False
    # Not if both the function and its rule were written in JAX.
    program, rule = known.programs[0].jaxpr, rule_of_custom_call(eqn.params)
    return not all(_JAX in _source(x) for x in (program, rule))


def _source(x) -> str:
    info = getattr(x, "debug_info", None)
    return str(getattr(info, "func_src_info", None))
