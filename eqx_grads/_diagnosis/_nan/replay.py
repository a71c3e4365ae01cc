"""Evaluate a derivative so that the values at a step of its loops can be looked at.

Outside of loops, equations run one by one: a compiled program would have to be compiled anew,
which takes minutes where there are thousands of equations. A loop is compiled. It counts where
a cotangent becomes non-finite, and its body can be run once more at one step. That also finds
the step of a loop in the body.

Where a cotangent is not finite, or exceeds the threshold, it is replaced by zero. So the
operands of each equation are finite cotangents, and what comes next is found as well.
"""

import dataclasses
import enum
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind, evaluate, with_fixed_dtypes
from ..._jaxprs.structure import Cond, Scan, structure, While
from .._programs.record import AbstractRecorder, record, record_inner, record_while
from ..progress import doing
from .derivative_program import Node


# Fused operations round differently: `a * b - c` is zero or not. A loop has to compute what is
# computed when one of its steps is evaluated once more, operation by operation.
_AS_WRITTEN = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


_MOST_CARRIES = 64  # of the loops of a program that are kept


class Way(enum.IntEnum):
    """How a cotangent is bad. The steps of a loop are counted for each: at one of them it may
    be zero times infinity, and at the next one infinity."""

    NAN_FACTOR = 0  # NaN, and there is a NaN in a factor
    NAN = 1
    INFINITE = 2
    LARGE = 3


@dataclasses.dataclass(frozen=True)
class Hit:
    """An equation makes a cotangent that is bad in one way.

    - `count`: in how many steps. `count_of_all`: in how many it is bad in any way.
    - `frames`: `frames(most)` are those of some of these steps, from the first to the last. Not
        of a step at which the cotangent, which was bad in the compiled loop, is not when the
        operations run one by one.
    """

    count: int
    count_of_all: int
    frames: Callable[[int], Iterator["Frame"]]


def is_bad(x: Any, threshold: float | None, xp: Any = np) -> Any:
    """Which elements are not finite, or exceed the threshold."""
    bad = ~xp.isfinite(x)
    if threshold is None:
        return bad
    with np.errstate(invalid="ignore"):
        return bad | (xp.abs(x) > xp.asarray(threshold, x.dtype).real)


def ways_of(x: Any, is_of_nan: Any, threshold: float | None, xp: Any = np) -> Sequence[Any]:
    """For each `Way`, which elements of an output are bad in it.

    - `is_of_nan`: whether there is a NaN in a factor.
    """
    is_nan = xp.isnan(x)
    large = is_bad(x, threshold, xp) & xp.isfinite(x)
    return is_nan & is_of_nan, is_nan & ~is_of_nan, xp.isinf(x), large


def has_nan_factor(node: Node, i: int, operands: Sequence[Any], xp: Any = np) -> Any:
    """Whether a NaN is in one of the operands of an equation that are no cotangents."""
    pairs = zip(node.eqns[i].invars, operands, strict=True)
    factors = [x for v, x in pairs if is_inexact(x) and not node.is_cotangent(v)]
    found = xp.bool_(False)
    for x in factors:
        found |= xp.any(xp.isnan(xp.asarray(x)))
    return found


def is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


class Frame:
    """The values of a program at given steps of the enclosing loops.

    `operands[i]` and `outputs[i]` are those of equation `i`, before a replacement. `lengths[i]`
    is how many steps it has made, if it is a loop. `iteration` is how often the body of a loop
    was run before. `hits` are those of the equations in this program, by their number and how
    the cotangent is bad.
    """

    def __init__(self, node: Node, values, threshold, parent=None, steps=(), iteration=0):
        self.node, self.parent, self.steps = node, parent, steps
        self.inputs, self.iteration = list(values), iteration
        self.operands: list[list[Any]] = []
        self.outputs: list[Sequence[Any]] = []
        self.lengths: dict[int, int] = {}
        self.hits: dict[int, dict[Way, Hit]] = {}
        self.threshold = threshold
        self._children: dict[tuple[int, int, int], Frame] = {}
        self._carries: dict[tuple[int, int], list[Any]] = {}
        self.results = evaluate(node.program, values, self._hook)

    @property
    def root(self) -> "Frame":
        return self if self.parent is None else self.parent.root

    def _hook(self, eqn, values):
        i = len(self.operands)
        if self.parent is None:
            doing("evaluating equation", i, len(self.node.eqns))
        self.operands.append(values)
        out = self._enter(i, eqn, values) if self.node.inner[i] else bind(eqn, values)
        self.outputs.append(out)
        if self.node.is_watched(i):
            replaced, found = _replaced(self.node, i, values, out, self.threshold, np)
            if any(found):
                here = Hit(1, 1, lambda most: iter([self]))
                hits = {way: here for way in Way if found[way]}
                self.hits[self.node.numbers[i]] = hits
                return [jnp.asarray(x) if is_inexact(x) else x for x in replaced]
        return out

    def _enter(self, i, eqn, values):
        known, part = structure(eqn), 0
        if isinstance(known, Scan | While):
            out, counts, first, n_steps = self._compiled(_run_loop, i)(values)
            self.lengths[i] = int(n_steps)
            numbers = [n for tree in self.node.inner[i] for n in tree.watched]
            self._add_hits(i, numbers, np.asarray(counts), first)
            return out
        if isinstance(known, Cond):
            part = int(np.clip(int(values[0]), 0, len(known.programs) - 1))
            values = values[1:]
        child = self._child(i, part, values, self.steps, 0)
        self.hits.update(child.hits)
        return child.results

    def _add_hits(self, i, numbers, counts, first):
        """Those of a loop, from the counts for each step, or from their sum and the first."""
        total = counts if first is not None else counts.sum(0)
        for k, way in np.argwhere(total[:, : len(Way)]):
            if first is not None:
                iterations = [int(first[k, way])]
            else:
                iterations = np.flatnonzero(counts[:, k, way]).tolist()
            frames = ft.partial(self._frames, i, numbers[k], Way(way), iterations)
            hits = self.hits.setdefault(numbers[k], {})
            hits[Way(way)] = Hit(int(total[k, way]), int(total[k, -1]), frames)

    def _frames(self, i, number, way, iterations, most) -> Iterator["Frame"]:
        chosen = spread(iterations, most)
        for iteration in chosen:
            hit = self.body(i, iteration).hits.get(number, {}).get(way)
            if hit is not None:
                yield from hit.frames(max(most // len(chosen), 1))

    def _child(self, i, part, values, steps, iteration):
        key = (i, part, iteration)
        if key not in self._children:
            inner = self.node.inner[i][part]
            self._children[key] = Frame(inner, values, self.threshold, self, steps, iteration)
        return self._children[key]

    def child(self, i: int) -> "Frame":
        """The program that an equation ran, if that is not a loop."""
        return next(f for (k, _, _), f in self._children.items() if k == i)

    def _compiled(self, run, i):
        key = (run, i)
        if key not in self.node.compiled:
            run = ft.partial(run, self.node, i, _BadCotangents(self.threshold))
            self.node.compiled[key] = jax.jit(run, compiler_options=_AS_WRITTEN)
        return self.node.compiled[key]

    def carry_before(self, i: int, iteration: int) -> list[Any]:
        """The carry of a loop after this number of steps.

        It is computed from the closest earlier one that is kept. A bisection asks for the same
        ones for each element that it is for.
        """
        kept = self._carries
        carry = kept.pop((i, iteration), None)
        if carry is None:
            start = max((n for k, n in kept if k == i and n < iteration), default=0)
            known = structure(self.node.eqns[i])
            assert isinstance(known, Scan | While)
            init = self.operands[i][known.n_before_carry :][: known.n_carry]
            carry = kept.get((i, start)) or with_fixed_dtypes(init)
            run = self._compiled(_carry_after, i)
            carry = run(self.operands[i], carry, start, iteration)
        kept[i, iteration] = carry  # the last one
        if len(kept) > _MOST_CARRIES:
            del kept[next(iter(kept))]
        return carry

    def body(self, i: int, iteration: int) -> "Frame":
        """The body of a loop, at this place in the order in which the steps run."""
        known, values = structure(self.node.eqns[i]), self.operands[i]
        assert isinstance(known, Scan | While)
        step = step_of(known, iteration)
        inputs = _body_inputs(known, values, self.carry_before(i, iteration), step)
        part = len(known.programs) - 1
        return self._child(i, part, inputs, (*self.steps, step), iteration)

    def at(self, node: Node, steps: Sequence[int]) -> "Frame | None":
        """The frame of a program inside this one, at these steps of all enclosing loops, if it
        was run."""
        if node is self.node:
            return self
        inner = node
        while inner.parent is not None and inner.parent is not self.node:
            inner = inner.parent
        i = inner.position
        known = structure(self.node.eqns[i])
        if isinstance(known, Scan | While):
            iteration = step_of(known, steps[len(self.steps)])  # the same formula
            is_run = 0 <= iteration < self.lengths[i]
            return self.body(i, iteration).at(node, steps) if is_run else None
        child = self._children.get((i, inner.part, 0))  # none of a branch that was not taken
        return child and child.at(node, steps)


def step_of(loop: Scan | While, iteration: Any) -> Any:
    """The index of a step from its place in the order in which the steps run, and the place
    from the index."""
    if isinstance(loop, Scan) and loop.reverse:
        return loop.length - 1 - iteration
    return iteration


def _body_inputs(loop: Scan | While, values, carry, step):
    if isinstance(loop, While):
        return [*values[loop.n_cond_consts :][: loop.n_body_consts], *carry]
    xs = values[loop.n_consts + loop.n_carry :]
    return [*values[: loop.n_consts], *carry, *(x[step] for x in xs)]


def spread(xs: Sequence[Any], most: int) -> Sequence[Any]:
    """Not more than `most` of these, from the first to the last."""
    if len(xs) <= most:
        return xs
    return [xs[i] for i in np.linspace(0, len(xs) - 1, most).astype(int)]


def _replaced(node: Node, i: int, operands, out, threshold, xp):
    """The outputs with zeros where they are bad, and whether an element is: for each `Way`, and
    in any way."""
    found, replaced = [xp.bool_(False)] * len(Way), []
    is_of_nan = has_nan_factor(node, i, operands, xp)
    if threshold is not None and i in node.within:
        threshold = None
    for v, x in zip(node.eqns[i].outvars, out, strict=True):
        if is_inexact(x) and v in node.cotangents:
            x = xp.asarray(x)
            ways = ways_of(x, is_of_nan, threshold, xp)
            found = [any_ | xp.any(bad) for any_, bad in zip(found, ways, strict=True)]
            bad = is_bad(x, threshold, xp)
            x = xp.where(bad, xp.zeros_like(x), x)
        replaced.append(x)
    return replaced, [*found, ft.reduce(xp.logical_or, found)]


# ---------------------------------------------------------------- inside of a compiled loop


@dataclasses.dataclass(frozen=True)
class _BadCotangents(AbstractRecorder):
    """Counts, for each watched equation of a program and of its inner ones, in the order of
    their numbers, the steps with a bad cotangent: for each `Way`, and in any way."""

    threshold: float | None

    def of_equation(self, tree, i, values, outs, inside):
        counts = [jnp.sum(x, tuple(range(x.ndim - 2)), jnp.int32) for x in inside]
        if not tree.inner[i]:
            # XLA would rewrite what no barrier separates.
            outs = jax.lax.optimization_barrier(outs)
        if tree.is_watched(i):
            outs, found = _replaced(tree, i, values, outs, self.threshold, jnp)
            counts = [jnp.stack(found)[None].astype(jnp.int32)]
        return outs, _concatenated(counts)

    def of_program(self, values, records):
        return _concatenated(records)


def _concatenated(counts):
    return jnp.concatenate([jnp.zeros((0, len(Way) + 1), jnp.int32), *counts])


def _run_loop(node: Node, i: int, recorder: _BadCotangents, values):
    """The outputs of a loop, the counts, and the number of steps.

    The counts of a scan are those of each step, in the order in which they run. Of a
    `while_loop` they are summed, and before the number of steps is the first of the steps with
    a bad cotangent.
    """
    eqn, inner = node.eqns[i], node.inner[i]
    known = structure(eqn)
    if isinstance(known, While):
        outs, counts, first, n_steps = record_while(known, inner, values, recorder)
        before = jnp.zeros_like(counts[0])
        return outs, jnp.concatenate(counts), jnp.concatenate([before, first]), n_steps
    assert isinstance(known, Scan)
    outs, [counts] = record_inner(eqn, inner, values, recorder)
    return outs, counts[::-1] if known.reverse else counts, None, known.length


def _carry_after(node: Node, i: int, recorder: _BadCotangents, values, carry, start, n_steps):
    """The carry of a loop after its first `n_steps` steps, from that after `start` steps."""
    known, body = structure(node.eqns[i]), node.inner[i][-1]
    assert isinstance(known, Scan | While)
    n_carry = known.n_carry

    def advance(k, carry):
        inputs = _body_inputs(known, values, carry, step_of(known, k))
        return with_fixed_dtypes(record(body, inputs, recorder)[0][:n_carry])

    return jax.lax.fori_loop(start, n_steps, advance, list(carry))
