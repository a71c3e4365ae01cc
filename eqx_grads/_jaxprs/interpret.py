"""Abstract interpretation: run a program on facts about its values instead of on values.

A domain defines the facts, how an equation maps them, and how two facts are joined. The
interpreter handles calls, branches and loops in the same way for all domains. A fact about the
carry of a loop holds in every step: it is the least fixed point of the body.
(P. Cousot and R. Cousot, Abstract interpretation, 1977.)
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from .structure import Cond, LinearCall, Scan, Structure, structure, While


V = TypeVar("V")
Path = tuple[Any, ...]


class Domain(NamedTuple, Generic[V]):
    """The facts about a value, and how they pass through a program.

    - `constant`: the fact about a constant of the program.
    - `join`: a fact that holds if either of two facts does; the first of two equal facts.
    - `apply`: facts about the outputs of an equation, from the facts about its operands. The
        interpreter calls it if an equation has no inner programs, is opaque, or is not entered.
        The last argument holds the enclosing equations, outermost first.
    - `enters`: whether the inner programs of an equation tell what it computes.
    - `decide`: changes an output of a branch or a loop, given the fact about the index of the
        branch, or about the condition of the loop.
    - `finish`: changes the outputs of an equation that was entered.
    - `widen`: replaces `join` for the carry of a loop before and after a step. It has to reach
        a fixed point after finitely many steps.
    """

    constant: Callable[[Any], V]
    join: Callable[[V, V], V]
    apply: Callable[[Any, Sequence[V], Path], Sequence[V]]
    enters: Callable[[Structure], bool] = lambda known: True
    decide: Callable[[Any, V, V], V] = lambda eqn, index, out: out
    finish: Callable[[Any, Sequence[V], Sequence[V]], Sequence[V]] = lambda eqn, ins, outs: outs
    widen: Callable[[V, V], V] | None = None


def fixed_point(step: Callable[[Any], Any], start: Any) -> Any:
    """Repeat a step until it changes nothing."""
    while (new := step(start)) != start:
        start = new
    return start


class Step(NamedTuple, Generic[V]):
    """An equation, the facts about its operands and outputs, and its inner programs, if the
    interpreter entered them."""

    eqn: Any
    ins: Sequence[V]
    outs: Sequence[V]
    inner: "Sequence[Interpretation[V]]"


class Interpretation(NamedTuple, Generic[V]):
    """The facts about the values of a program. They hold in all runs of the program."""

    program: ClosedJaxpr
    ins: Sequence[V]
    outs: Sequence[V]
    steps: list[Step[V]]


def interpret(
    program: ClosedJaxpr, ins: Sequence[V], domain: Domain[V], path: Path = ()
) -> Interpretation[V]:
    """Find the facts about all values of a program from the facts about its inputs."""
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
    """Find the facts about the outputs of an equation, and about its inner programs."""
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
