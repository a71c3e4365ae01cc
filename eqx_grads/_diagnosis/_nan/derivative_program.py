"""The program of a derivative: which of its variables are cotangents, and its inner programs.

The derivative of a loss is traced with its seed as an input. The cotangents are then the
variables that depend on the seed. Rules have become equations: no derivative is lost.
"""

import dataclasses
import functools as ft
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    inner_programs,
    Scan,
    structure,
    While,
)
from ..origins import equation_tag, NumberedLoss, Origin
from ..source_lines import rule_line


@dataclasses.dataclass(eq=False)
class Node:
    """A program at one place of the derivative.

    - `parent`, `position`, `part`: it is inner program `part` of equation `position` of
        `parent`.
    - `first`: the number of its first equation. The equations of an inner program follow the
        one that they are in.
    - `inner`: for each equation the inner programs, if they can be entered.
    - `cotangents`: the variables that depend on the seed. `active`: on the model.
    - `loops`: how many loops it is in.
    """

    program: ClosedJaxpr
    parent: "Node | None"
    position: int
    part: int
    loops: int
    first: int
    cotangents: set[Any]
    active: set[Any]
    numbers: list[int] = dataclasses.field(default_factory=list)
    inner: list[tuple["Node", ...]] = dataclasses.field(default_factory=list)
    end: int = 0
    producers: dict[Any, tuple[int, int]] = dataclasses.field(default_factory=dict)
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def eqns(self) -> Sequence[Any]:
        return self.program.jaxpr.eqns

    def is_watched(self, position: int) -> bool:
        """Whether an equation computes a cotangent by itself."""
        eqn = self.eqns[position]
        return not self.inner[position] and any(
            v in self.cotangents and jnp.issubdtype(v.aval.dtype, jnp.inexact)
            for v in eqn.outvars
        )

    def is_cotangent(self, atom: Any) -> bool:
        return _is_in(atom, self.cotangents)

    def is_active(self, atom: Any) -> bool:
        return _is_in(atom, self.active)

    @ft.cached_property
    def watched(self) -> Sequence[int]:
        """The numbers of the watched equations, also of those in inner programs."""
        found = []
        for i, number in enumerate(self.numbers):
            found += [number] * self.is_watched(i)
            found += [n for inner in self.inner[i] for n in inner.watched]
        return found

    @ft.cached_property
    def within(self) -> frozenset[int]:
        """The equations of which only others of the derivative of one equation of the loss use
        the results: what they compute is no cotangent of a value of the loss."""
        users: dict[Any, set[str]] = defaultdict(set)
        for eqn in self.eqns:
            for v in eqn.invars:
                if not isinstance(v, Literal):
                    users[v].add(equation_tag(eqn))
        for v in self.program.jaxpr.outvars:
            if not isinstance(v, Literal):
                users[v].add("")
        tags = [equation_tag(eqn) for eqn in self.eqns]
        return frozenset(
            i
            for i, (eqn, tag) in enumerate(zip(self.eqns, tags, strict=True))
            if tag and set().union(*(users[v] for v in eqn.outvars)) == {tag}
        )


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a loss as a program, of which the outputs are the loss and the gradient
    of each leaf; in forward mode, the loss and its tangent.

    `places[i]` are the program and the position in it of equation `i`.
    """

    numbered: NumberedLoss
    root: Node
    places: Sequence[tuple[Node, int]]
    is_reverse: bool

    def origin(self, node: Node, position: int) -> Origin | None:
        """The equation of the loss that an equation comes from."""
        eqn = node.eqns[position]
        origin = self.numbered.origin_of(eqn)
        while origin is None and node.parent is not None:
            node, position = node.parent, node.position
            origin = self.numbered.origin_of(node.eqns[position])
        return origin

    def loops_of(self, node: Node) -> list[tuple[Node, int]]:
        """The enclosing loops of a program, outermost first."""
        found = []
        while node.parent is not None:
            if isinstance(structure(node.parent.eqns[node.position]), Scan | While):
                found.append((node.parent, node.position))
            node = node.parent
        return found[::-1]

    def steps_of(self, node: Node, steps: Sequence[int]) -> tuple[int, ...]:
        """The steps of the loops around a program, as the user counts them: `filter_scan` runs
        its steps in chunks for some choices of `checkpoint`. Only those that are known: the
        loop of a solver has a rule, in which another loop runs some steps forward and some
        backward, and counts both."""
        found, n_before = [], 0
        for (outer, position), step in zip(self.loops_of(node), steps, strict=True):
            if self._is_of_library(outer, position):
                break
            names = self._names(outer, position)
            chunks = re.findall(r"eqg_chunks_of_(\d+)", names)
            first = re.findall(r"eqg_steps_from_(\d+)", names)
            if chunks:
                n_before += int(step) * int(chunks[-1])
                continue
            n_before += int(first[-1]) if first else 0
            found.append(n_before + int(step))
            n_before = 0
        return tuple(found)

    def _is_of_library(self, node: Node, position: int) -> bool:
        """Whether a `while_loop` is in a rule that no code of the user's calls it in."""
        eqn, origin = node.eqns[position], self.origin(node, position)
        is_in_rule = origin is None or isinstance(structure(origin.eqn), CallWithRule)
        return isinstance(structure(eqn), While) and is_in_rule and not rule_line(eqn).file

    def _names(self, node: Node, position: int) -> str:
        """The names around an equation of the loss, up to the next loop around it."""
        origin = self.origin(node, position)
        if origin is None:
            return ""
        names = str(origin.eqn.source_info.name_stack)
        for number in reversed(origin.enclosing):
            if number in origin.loops:
                break
            names = f"{self.numbered.origins[number].eqn.source_info.name_stack}/{names}"
        return names


def differentiate(numbered: NumberedLoss) -> Derivative:
    """The derivative in reverse mode. If the loss has none, in forward mode."""
    values = list(numbered.traced.values)
    n_leaves = len(numbered.traced.leaves)

    def reverse(values, seed):
        fixed = values[n_leaves:]
        value, pullback = jax.vjp(lambda *leaves: numbered(*leaves, *fixed), *values[:n_leaves])
        return value, pullback(seed)

    def forward(values, seeds):
        fixed = values[n_leaves:]
        fn = lambda *leaves: numbered(*leaves, *fixed)
        return jax.jvp(fn, tuple(values[:n_leaves]), tuple(seeds))

    seed = jnp.ones_like(numbered.traced.program.out_avals[0])
    try:
        program = jax.make_jaxpr(reverse)(values, seed)
        n_seeds, is_reverse = 1, True
    except ValueError as error:
        # A `while_loop` has no derivative in reverse mode. There is no other sign of it: the
        # loop may be in a function with a rule, which has a derivative.
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        seeds = [jnp.ones_like(x) for x in values[:n_leaves]]
        program = jax.make_jaxpr(forward)(values, seeds)
        n_seeds, is_reverse = len(seeds), False
    n_values = len(values)
    seeds = [False] * n_values + [True] * n_seeds
    model = [i < n_leaves for i in range(n_values)] + [False] * n_seeds
    places: list[tuple[Node, int]] = []
    root = _node(program, None, 0, 0, 0, seeds, model, places)
    return Derivative(numbered, root, places, is_reverse)


def is_entered(eqn: Any) -> bool:
    known = structure(eqn)
    if isinstance(known, Cond):
        return not known.by_platform
    return isinstance(known, Call | CallWithRule | Checkpoint | Scan | While)


def _node(program, parent, position, part, loops, seeds, model, places) -> Node:
    cotangents, active = _dependent(program, seeds), _dependent(program, model)
    first = len(places)
    node = Node(program, parent, position, part, loops, first, cotangents, active)
    for i, eqn in enumerate(node.eqns):
        node.numbers.append(len(places))
        places.append((node, i))
        node.producers.update((v, (i, k)) for k, v in enumerate(eqn.outvars))
        parts = ()
        if is_entered(eqn):
            inside = loops + isinstance(structure(eqn), Scan | While)
            seeds_in, model_in = _inner_flags(eqn, cotangents), _inner_flags(eqn, active)
            parts = tuple(
                _node(program, node, i, k, inside, seeds_in[k], model_in[k], places)
                for k, program in enumerate(inner_programs(eqn))
            )
        node.inner.append(parts)
    node.end = len(places)
    return node


def _dependent(program: ClosedJaxpr, flags: Sequence[bool]) -> set[Any]:
    """The variables that depend on a flagged input, also through inner programs."""
    flagged = {v for v, flag in zip(program.jaxpr.invars, flags, strict=True) if flag}
    for eqn in program.jaxpr.eqns:
        if not any(_is_in(v, flagged) for v in eqn.invars):
            continue
        outs = _output_flags(eqn, flagged) if is_entered(eqn) else [True] * len(eqn.outvars)
        flagged.update(
            v
            for v, flag in zip(eqn.outvars, outs, strict=True)
            # A comparison has no derivative: its result is as good as a constant.
            if flag and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        )
    return flagged


def _is_in(atom, flagged) -> bool:
    return not isinstance(atom, Literal) and atom in flagged


def _outputs(program: ClosedJaxpr, flags: Sequence[bool]) -> list[bool]:
    flagged = _dependent(program, flags)
    return [_is_in(v, flagged) for v in program.jaxpr.outvars]


def _inner_flags(eqn: Any, flagged: set[Any]) -> list[list[bool]]:
    """For each inner program, which of its inputs depend on a flagged variable."""
    flags = [_is_in(v, flagged) for v in eqn.invars]
    match structure(eqn):
        case Cond() as cond:
            return [flags[1:]] * len(cond.programs)
        case Scan() as scan:
            fixed, rest = flags[: scan.n_consts], flags[scan.n_consts :]
            xs = rest[scan.n_carry :]
            body = lambda carry: _outputs(*scan.programs, [*fixed, *carry, *xs])
            return [[*fixed, *_fixed_point(body, rest[: scan.n_carry]), *xs]]
        case While() as loop:
            n, m = loop.n_cond_consts, loop.n_body_consts
            fixed = flags[n : n + m]
            body = lambda carry: _outputs(loop.programs[1], [*fixed, *carry])
            carry = _fixed_point(body, flags[n + m :])
            return [[*flags[:n], *carry], [*fixed, *carry]]
    return [flags]


def _fixed_point(body, carry: list[bool]) -> list[bool]:
    while True:
        out = [a or b for a, b in zip(carry, body(carry)[: len(carry)], strict=True)]
        if out == carry:
            return carry
        carry = out


def _output_flags(eqn: Any, flagged: set[Any]) -> list[bool]:
    programs, flags = inner_programs(eqn), _inner_flags(eqn, flagged)
    if isinstance(structure(eqn), While):
        return flags[1][-len(eqn.outvars) :] if eqn.outvars else []
    outs = [_outputs(p, f) for p, f in zip(programs, flags, strict=True)]
    return [any(each) for each in zip(*outs, strict=True)]
