"""Abstract interpretation of a program: what is known of its values without running it.

A domain says what may be known of a value, what an equation makes of it, and what is known of a
value that is one of two. Calls, branches and loops are the same for all domains. What is known
of the carry of a loop holds in all of its steps: it is the least fixed point of the body.
(P. Cousot and R. Cousot, Abstract interpretation, 1977.)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from .structure import Cond, LinearCall, Scan, Structure, structure, While


V = TypeVar("V")
Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Domain(Generic[V]):
    """What may be known of a value.

    - `constant`: what is known of a constant of the program.
    - `join`: what is known of a value that is either the one or the other. Of two that are
        equal it returns the first.
    - `apply`: the outputs of an equation, from what is known of its operands. It is called for
        an equation that has no inner programs, that is opaque, or that is not entered. The last
        argument holds the enclosing equations, outermost first.
    - `enters`: whether the inner programs of an equation tell what it computes.
    - `decide`: an output of a branch or a loop, also given what is known of the index of the
        branch, or of the condition of the loop.
    - `finish`: the outputs of an equation that was entered.
    - `widen`: as `join`, for the carry of a loop before and after a step. Has to reach a fixed
        point after finitely many steps.
    """

    constant: Callable[[Any], V]
    join: Callable[[V, V], V]
    apply: Callable[[Any, Sequence[V], Path], Sequence[V]]
    enters: Callable[[Structure], bool] = lambda known: True
    decide: Callable[[Any, V, V], V] = lambda eqn, index, out: out
    finish: Callable[[Any, Sequence[V], Sequence[V]], Sequence[V]] = lambda eqn, ins, outs: outs
    widen: Callable[[V, V], V] | None = None


class Step(NamedTuple, Generic[V]):
    """An equation, what is known of its operands and outputs, and its inner programs, if they
    were entered."""

    eqn: Any
    ins: Sequence[V]
    outs: Sequence[V]
    inner: "Sequence[Interpretation[V]]"


class Interpretation(NamedTuple, Generic[V]):
    """What is known of the values of a program, in all runs of it."""

    program: ClosedJaxpr
    ins: Sequence[V]
    outs: Sequence[V]
    steps: list[Step[V]]


def interpret(
    program: ClosedJaxpr, ins: Sequence[V], domain: Domain[V], path: Path = ()
) -> Interpretation[V]:
    """What is known of all values of a program, given what is known of its inputs."""
    jaxpr, steps = program.jaxpr, []
    env = dict(zip(jaxpr.constvars, map(domain.constant, program.consts), strict=True))
    env.update(zip(jaxpr.invars, ins, strict=True))
    read = lambda v: domain.constant(v.val) if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        step = interpret_equation(eqn, [read(v) for v in eqn.invars], domain, path)
        env.update(zip(eqn.outvars, step.outs, strict=True))
        steps.append(step)
    return Interpretation(program, ins, [read(v) for v in jaxpr.outvars], steps)


def interpret_equation(
    eqn: Any, ins: Sequence[V], domain: Domain[V], path: Path = ()
) -> Step[V]:
    """What is known of the outputs of an equation, and of its inner programs."""
    known, inside = structure(eqn), (*path, eqn)
    if known is None or isinstance(known, LinearCall) or not domain.enters(known):
        return Step(eqn, ins, domain.apply(eqn, ins, path), ())
    match known:
        case Scan() | While():
            inner, outs = _loop(eqn, known, ins, domain, inside)
        case Cond():
            inner = [interpret(p, ins[1:], domain, inside) for p in known.programs]
            outs = inner[0].outs
            for other in inner[1:]:
                outs = list(map(domain.join, outs, other.outs))
            outs = [domain.decide(eqn, ins[0], out) for out in outs]
        case _:
            inner = [interpret(*known.programs, ins, domain, inside)]
            outs = inner[0].outs
    return Step(eqn, ins, domain.finish(eqn, ins, outs), inner)


def _loop(eqn, loop: Scan | While, ins, domain: Domain[V], inside: Path):
    n, m = loop.n_before_carry, loop.n_before_carry + loop.n_carry
    n_cond = loop.n_cond_consts if isinstance(loop, While) else 0
    carry, widen = list(ins[n:m]), domain.widen or domain.join
    while True:
        inner = []
        if isinstance(loop, While):
            inner = [interpret(loop.programs[0], [*ins[:n_cond], *carry], domain, inside)]
        body = interpret(loop.programs[-1], [*ins[n_cond:n], *carry, *ins[m:]], domain, inside)
        outs = body.outs
        if inner:
            outs = [domain.decide(eqn, inner[0].outs[0], out) for out in outs]
        joined = [widen(a, b) for a, b in zip(carry, outs, strict=False)]
        if joined == carry:
            return [*inner, body], [*carry, *outs[loop.n_carry :]]
        carry = joined
