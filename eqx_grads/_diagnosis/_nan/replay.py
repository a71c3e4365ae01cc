"""Evaluate a derivative so that the values at a step of its loops can be looked at.

Outside of loops, equations run one by one: a compiled program would have to be compiled anew,
which takes minutes where there are thousands of equations. A loop is compiled. It counts where
a cotangent becomes non-finite, and its body can be run once more at one step.

Where a cotangent is not finite, or exceeds the threshold, it is replaced by zero. So the
operands of each equation are finite cotangents, and what comes next is found as well.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind, enter_with_state, evaluate
from ..._jaxprs.structure import Cond, Scan, structure, While
from ..progress import doing
from .derivative_program import Node


# Fused operations round differently: `a * b - c` is zero or not. A loop has to compute what is
# computed when one of its steps is evaluated once more, operation by operation.
_AS_WRITTEN = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass
class Hit:
    """An equation makes a bad cotangent: in how many steps, and the first step of each
    enclosing loop, outermost first."""

    count: int
    steps: tuple[int, ...]


def is_bad(x: Any, threshold: float | None, xp: Any = np) -> Any:
    """Which elements are not finite, or exceed the threshold."""
    bad = ~xp.isfinite(x)
    if threshold is None:
        return bad
    with np.errstate(invalid="ignore"):
        return bad | (xp.abs(x) > xp.asarray(threshold, x.dtype).real)


def is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


class Frame:
    """The values of a program at given steps of the enclosing loops.

    `operands[i]` and `outputs[i]` are those of equation `i`, before a replacement.
    `iteration` is how often the body of a loop was run before.
    """

    def __init__(self, node: Node, values, parent, steps, threshold, hits, iteration=0):
        self.node, self.parent, self.steps = node, parent, steps
        self.inputs, self.iteration = list(values), iteration
        self.operands: list[list[Any]] = []
        self.outputs: list[Sequence[Any]] = []
        self.n_steps: dict[int, int] = {}  # of each `while_loop`
        self._threshold, self._hits = threshold, hits
        self._children: dict[tuple[int, int, int], Frame] = {}
        self.results = evaluate(node.program, values, self._hook)

    def _hook(self, eqn, values):
        i = len(self.operands)
        if self.parent is None:
            doing("evaluating equation", i, len(self.node.eqns))
        self.operands.append(values)
        inner = self.node.inner[i]
        if not inner:
            out = bind(eqn, values)
            self.outputs.append(out)
            return self._watched(i, out) if self.node.is_watched(i) else out
        out = self._enter(i, eqn, values)
        self.outputs.append(out)
        return out

    def _watched(self, i, out):
        """The outputs with zeros where they are bad."""
        replaced = []
        found = False
        for v, x in zip(self.node.eqns[i].outvars, out, strict=True):
            if is_inexact(x) and v in self.node.cotangents:
                array = np.asarray(x)
                bad = is_bad(array, self._threshold)
                if bad.any():
                    found = True
                    x = jnp.asarray(np.where(bad, np.zeros_like(array), array))
            replaced.append(x)
        if found:
            self._add(self.node.numbers[i], 1, self.steps)
        return replaced

    def _add(self, number, count, steps):
        hit = self._hits.setdefault(number, Hit(0, steps))
        hit.count += count

    def _enter(self, i, eqn, values):
        known = structure(eqn)
        if isinstance(known, Scan | While):
            out, (counts, steps, n_steps) = self._loop(i)(values)
            self.n_steps[i] = int(n_steps)
            first = self.node.inner[i][0].first
            for k in np.flatnonzero(np.asarray(counts)):
                depth = self.node_at(first + int(k), i).loops - self.node.loops
                inside = tuple(int(s) for s in np.asarray(steps)[k][:depth])
                self._add(first + int(k), int(counts[k]), (*self.steps, *inside))
            return out
        part = 0
        if isinstance(known, Cond):
            part = int(np.clip(int(values[0]), 0, len(known.programs) - 1))
            values = values[1:]
        child = self._child(i, part, values, self.steps, 0)
        return child.results

    def node_at(self, number: int, position: int) -> Node:
        """The program with equation `number`, inside the equation at `position`."""
        nodes = list(self.node.inner[position])
        while True:
            node = next(n for n in nodes if n.first <= number < n.end)
            if number in node.numbers:
                return node
            nodes = [inner for parts in node.inner for inner in parts]

    def _child(self, i, part, values, steps, iteration):
        key = (i, part, iteration)
        if key not in self._children:
            inner = self.node.inner[i][part]
            self._children[key] = Frame(
                inner, values, self, steps, self._threshold, self._hits, iteration
            )
        return self._children[key]

    def child(self, i: int) -> "Frame":
        """The program that an equation ran, if that is not a loop."""
        return next(f for (k, _, _), f in self._children.items() if k == i)

    def has_run(self, node: Node) -> bool:
        """Whether an inner program was not a branch that was not taken."""
        key = (node.position, node.part, 0)
        is_loop = isinstance(structure(self.node.eqns[node.position]), Scan | While)
        return is_loop or key in self._children

    def _loop(self, i):
        key = ("loop", i)
        if key not in self.node.compiled:
            loop = ft.partial(_run_loop, self.node, i, self._threshold)
            self.node.compiled[key] = jax.jit(loop, compiler_options=_AS_WRITTEN)
        return self.node.compiled[key]

    def length(self, i: int) -> int:
        """How many steps a loop has made."""
        known = structure(self.node.eqns[i])
        return known.length if isinstance(known, Scan) else self.n_steps[i]

    def carry_before(self, i: int, iteration: int) -> list[Any]:
        """The carry of a loop after this number of steps."""
        key = ("carry", i)
        if key not in self.node.compiled:
            carry_after = ft.partial(_carry_after, self.node, i, self._threshold)
            self.node.compiled[key] = jax.jit(carry_after, compiler_options=_AS_WRITTEN)
        return self.node.compiled[key](self.operands[i], iteration)

    def step_of(self, i: int, iteration: int) -> int:
        """The index of a step from its place in the order in which the steps run."""
        known = structure(self.node.eqns[i])
        if isinstance(known, Scan) and known.reverse:
            return known.length - 1 - iteration
        return iteration

    iteration_of = step_of  # the same formula

    def body(self, i: int, iteration: int) -> "Frame":
        """The body of a loop, at this place in the order in which the steps run."""
        known, values = structure(self.node.eqns[i]), self.operands[i]
        carry = self.carry_before(i, iteration)
        step = self.step_of(i, iteration)
        if isinstance(known, Scan):
            consts, xs = values[: known.n_consts], values[known.n_consts + known.n_carry :]
            inputs, part = [*consts, *carry, *(x[step] for x in xs)], 0
        else:
            assert isinstance(known, While)
            start = known.n_cond_consts
            inputs = [*values[start : start + known.n_body_consts], *carry]
            part = 1
        # What it finds has been counted by the loop.
        hits, self._hits = self._hits, {}
        frame = self._child(i, part, inputs, (*self.steps, step), iteration)
        self._hits = hits
        return frame

    def at(self, node: Node, steps: Sequence[int]) -> "Frame | None":
        """The frame of a program inside this one, at these steps of all enclosing loops, if it
        was run."""
        if node is self.node:
            return self
        inner = node
        while inner.parent is not None and inner.parent is not self.node:
            inner = inner.parent
        if not self.has_run(inner):
            return None
        i = inner.position
        if isinstance(structure(self.node.eqns[i]), Scan | While):
            iteration = self.iteration_of(i, steps[len(self.steps)])
            if not 0 <= iteration < self.length(i):
                return None
            return self.body(i, iteration).at(node, steps)
        return self.child(i).at(node, steps)


# ---------------------------------------------------------------- inside of a compiled loop


def _run_loop(node: Node, i: int, threshold, values):
    """The outputs of a loop; for each equation in it the number of steps with a bad cotangent
    and the first of these steps, one column for each loop; and the number of steps."""
    return _traced_loop(node, i, threshold, values, node.loops, _depth(node, i))


def _depth(node: Node, i: int) -> int:
    """How many loops are nested in a loop, which counts."""
    return max(n.loops for n in _below(node.inner[i])) - node.loops


def _below(nodes):
    for node in nodes:
        yield node
        for parts in node.inner:
            yield from _below(parts)


def _traced_loop(node: Node, i: int, threshold, values, base: int, depth: int):
    """`base`: the number of loops around the outermost compiled one."""
    inner = node.inner[i]
    first, n = inner[0].first, inner[-1].end - inner[0].first
    column = inner[0].loops - base - 1

    def run(part, values, state, step):
        body = inner[part]
        outs, counts, steps = _traced(body, values, threshold, base, depth)
        if isinstance(structure(node.eqns[i]), While) and part == 0:
            return outs, state
        steps = steps.at[:, column].set(step)
        rows = slice(body.first - first, body.end - first)
        all_counts, all_steps, n_steps = state
        is_first = (all_counts[rows] == 0) & (counts > 0)
        merged = jnp.where(is_first[:, None], steps, all_steps[rows])
        all_steps = all_steps.at[rows].set(merged)
        return outs, (all_counts.at[rows].add(counts), all_steps, n_steps + 1)

    start = (jnp.zeros(n, jnp.int32), jnp.zeros((n, depth), jnp.int32), jnp.int32(0))
    return enter_with_state(node.eqns[i], values, run, start)


def _traced(node: Node, values, threshold, base: int, depth: int):
    """The outputs of a program, and a count and steps for each of its equations."""
    counts, steps = [], []
    positions = iter(range(len(node.eqns)))

    def hook(eqn, values):
        i = next(positions)
        inner = node.inner[i]
        if not inner:
            # XLA would rewrite what no barrier separates.
            out, count = jax.lax.optimization_barrier(bind(eqn, values)), jnp.int32(0)
            if node.is_watched(i):
                out, count = _replaced(node, eqn, out, threshold)
            counts.append(count[None])
            steps.append(jnp.zeros((1, depth), jnp.int32))
            return out
        out, more_counts, more_steps = _traced_inner(node, i, values, threshold, base, depth)
        counts.extend([jnp.zeros(1, jnp.int32), more_counts])
        steps.extend([jnp.zeros((1, depth), jnp.int32), more_steps])
        return out

    outs = evaluate(node.program, values, hook)
    if not counts:
        return outs, jnp.zeros(0, jnp.int32), jnp.zeros((0, depth), jnp.int32)
    return outs, jnp.concatenate(counts), jnp.concatenate(steps)


def _traced_inner(node: Node, i: int, values, threshold, base, depth):
    eqn, inner = node.eqns[i], node.inner[i]
    if isinstance(structure(eqn), Scan | While):
        out, (counts, steps, _) = _traced_loop(node, i, threshold, values, base, depth)
        return out, counts, steps
    first, n = inner[0].first, inner[-1].end - inner[0].first

    def run(part, values, state, step):
        del step
        body = inner[part]
        outs, counts, steps = _traced(body, values, threshold, base, depth)
        rows = slice(body.first - first, body.end - first)
        return outs, (state[0].at[rows].set(counts), state[1].at[rows].set(steps))

    start = (jnp.zeros(n, jnp.int32), jnp.zeros((n, depth), jnp.int32))
    out, (counts, steps) = enter_with_state(eqn, values, run, start)
    return out, counts, steps


def _replaced(node: Node, eqn, out, threshold):
    found, replaced = jnp.bool_(False), []
    for v, x in zip(eqn.outvars, out, strict=True):
        if is_inexact(x) and v in node.cotangents:
            bad = is_bad(x, threshold, jnp)
            found |= jnp.any(bad)
            x = jnp.where(bad, jnp.zeros_like(x), x)
        replaced.append(x)
    return replaced, found.astype(jnp.int32)


def _carry_after(node: Node, i: int, threshold, values, n_steps):
    """The carry of a loop after its first `n_steps` steps."""
    known = structure(node.eqns[i])
    base, depth = node.loops, _depth(node, i)
    body = lambda inputs: _traced(node.inner[i][-1], inputs, threshold, base, depth)[0]
    fixed_dtypes = lambda xs: [jnp.asarray(x, x.dtype) for x in xs]
    if isinstance(known, While):
        start = known.n_cond_consts
        consts = values[start : start + known.n_body_consts]
        init = values[start + known.n_body_consts :]

        def advance(k, carry):
            del k
            return fixed_dtypes(body([*consts, *carry]))

    else:
        assert isinstance(known, Scan)
        n = known.n_consts
        consts, init, xs = (
            values[:n],
            values[n : n + known.n_carry],
            values[n + known.n_carry :],
        )

        def advance(k, carry):
            step = known.length - 1 - k if known.reverse else k
            inputs = [*consts, *carry, *(x[step] for x in xs)]
            return fixed_dtypes(body(inputs)[: known.n_carry])

    return jax.lax.fori_loop(0, n_steps, advance, fixed_dtypes(init))
