"""Traced programs, taken apart: which equations depend on what, and which are needed."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxprs_in_params, Literal


# Equations that are nothing but a part of the program they stand in.
_CALLS = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr"}


def depends(jaxpr: ClosedJaxpr, flags: Sequence[bool]) -> set[Any]:
    """The variables that depend on a flagged input."""
    flagged = {v for v, f in zip(jaxpr.jaxpr.invars, flags, strict=True) if f}
    for eqn in jaxpr.jaxpr.eqns:
        if any(v in flagged for v in variables(eqn.invars)):
            flagged.update(eqn.outvars)
    return flagged


def needed(
    eqns: Sequence[Any], outputs: Iterable[Any], there: Set[Any] = frozenset()
) -> tuple[list[Any], set[Any]]:
    """The equations, in order, that these outputs need, and all the variables that do.

    Not those for variables that are `there`.
    """
    wanted, kept = set(variables(outputs)), []
    for eqn in reversed(eqns):
        if any(v in wanted and v not in there for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(variables(eqn.invars))
    return kept[::-1], wanted


def free_variables(eqns: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
    """What these equations, and who reads these outputs of theirs, take from elsewhere."""
    bound: set[Any] = set()
    free: dict[Any, None] = {}  # a set with an order
    for eqn in eqns:
        free.update((v, None) for v in variables(eqn.invars) if v not in bound)
        bound.update(eqn.outvars)
    free.update((v, None) for v in variables(outputs) if v not in bound)
    return list(free)


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


def equations(program: ClosedJaxpr) -> Iterator[Any]:
    """All equations of a program, those of inner programs among them."""
    for eqn in program.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(as_closed(inner))


def holds(program: ClosedJaxpr, *names: str) -> bool:
    """Whether there is an equation of such a name anywhere in a program."""
    return any(eqn.primitive.name in names for eqn in equations(program))


def as_closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def run(
    eqns: Sequence[Any],
    env: dict[Any, Any],
    outputs: Iterable[Any],
    apply: Callable[[Any, Sequence[Any]], Sequence[Any]] | None = None,
) -> list[Any]:
    """The values of `outputs`, given those of all free variables."""
    apply = _apply if apply is None else apply
    env = dict(env)
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for eqn in eqns:
        env.update(zip(eqn.outvars, apply(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [jnp.asarray(read(v), v.aval.dtype) for v in outputs]


def _apply(eqn, ins):
    with eqn.ctx.manager:  # where it is computed, and what XLA is told of it
        out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def inlined(
    fn: Callable[..., Sequence[Any]], flags: Sequence[bool], *types: Any
) -> ClosedJaxpr:
    """The program of a function of arrays, without calls of inner programs.

    Of two operands of a matrix product, that which depends on a flagged argument comes first:
    `x @ w.T` instead of `w @ x`. XLA is faster with that for a whole batch of `x` on a CPU.
    """
    jaxpr = jax.make_jaxpr(lambda *args: list(fn(*args)))(*types)
    return jax.make_jaxpr(lambda *args: _run_inlined(jaxpr, flags, args))(*jaxpr.in_avals)


def _run_inlined(jaxpr: ClosedJaxpr, flags: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, args, strict=True))
    flagged = depends(jaxpr, flags)
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        moves = [not isinstance(v, Literal) and v in flagged for v in eqn.invars]
        inner = _inner_program(eqn)
        if inner is not None:
            out = _run_inlined(inner, moves, ins)
        elif _is_product(eqn) and moves == [False, True]:
            a, b = ins
            out = [_swapped_product(a, b, eqn.params)]
        else:
            out = _apply(eqn, ins)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.jaxpr.outvars]


def with_sums_in_rows(fn: Callable[..., Sequence[Any]], *types: Any) -> ClosedJaxpr:
    """The program of a function, with products `x.T @ y` that are really computed like that.

    XLA's matrix product for CPUs is slow where the left operand is contracted along its first
    axes, and without a barrier that is what it makes of a transpose.
    """
    jaxpr = jax.make_jaxpr(lambda *args: list(fn(*args)))(*types)
    transposes = {e.outvars[0] for e in jaxpr.eqns if e.primitive is jax.lax.transpose_p}

    def apply(eqn, ins):
        if eqn.primitive is jax.lax.dot_general_p and eqn.invars[0] in transposes:
            ins = [jax.lax.optimization_barrier(ins[0]), ins[1]]
        return _apply(eqn, ins)

    def again(*args):
        env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        env.update(zip(jaxpr.jaxpr.invars, args, strict=True))
        return run(jaxpr.eqns, env, jaxpr.jaxpr.outvars, apply)

    return jax.make_jaxpr(again)(*jaxpr.in_avals)


def _inner_program(eqn) -> ClosedJaxpr | None:
    """What an equation runs, if it is a mere call, and nothing is said of the devices."""
    name = _CALLS.get(eqn.primitive.name)
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if name is None or any(type(s).__name__ != "UnspecifiedValue" for s in shardings):
        return None
    return as_closed(eqn.params[name])


def _is_product(eqn) -> bool:
    """Whether an equation is a matrix product whose operands are like each other."""
    if eqn.primitive is not jax.lax.dot_general_p:
        return False
    is_pair = (
        isinstance(eqn.params["precision"], tuple) and len(set(eqn.params["precision"])) > 1
    )
    return not is_pair and eqn.params.get("out_sharding") is None


def _swapped_product(a, b, params):
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    numbers = ((contract_b, contract_a), (batch_b, batch_a))
    out = jax.lax.dot_general_p.bind(b, a, **{**params, "dimension_numbers": numbers})
    n = len(batch_a)
    n_b = b.ndim - len(contract_b) - n
    return jnp.transpose(out, (*range(n), *range(n + n_b, out.ndim), *range(n, n + n_b)))
