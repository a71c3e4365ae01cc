"""The check `transforms`: the same results under every transformation as without one.

The rule is compared with itself, so no other reference is needed: with eager calls at the
arguments, and with the compiled derivative at the examples of a batch.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs.operands import fill
from .._rules.tree_split import call_on_arrays
from ._case import Case
from ._oracle import At, Row, rows_of, unless_error
from ._outcome import outcome
from ._report import broke, compare, Finding
from ._subject import FlatFunction, is_output


# The factors of the leaves in the examples of a batch; equal factors where the function raises
# an error at others: its domain may have an end close by.
_MOVES = ((1.0, 0.97, 0.94), (1.0, 1.0, 1.0))
# The factors of tangents and cotangents in the derivative of a batch: mixed-up examples show
# there, even if they are equal.
_ALONG = (1.0, 0.5, 2.0)
_ALL_SUBSETS = 3  # of the arguments, for `vmap`


# The name of a transformation, `run`, and `want`: `run(at)` should return `want()`.
_Trial = tuple[str, Row, Callable[[], Any]]


class _Examples:
    """The examples of a batch, and the value and the derivatives at them."""

    def __init__(self, case: Case):
        self.case, self.f, self.leaves = case, case.own.f, case.subject.leaves
        self.t, self.w = case.at.t, case.at.w
        for self.move in _MOVES:
            moved = lambda k: [np.asarray(x) * k for x in self.leaves]
            self.examples = list(map(moved, self.move))
            runs = (case.own.derive(case.at._replace(x=xs))["f"] for xs in self.examples)
            if not any(isinstance(x, Exception) for x in runs):
                break
        many = [np.stack(column) for column in zip(*self.examples, strict=True)]
        self.at = case.at._replace(many=many)

    def derive(self, fn: Callable[..., Any], at: At) -> list[Any]:
        """Value, tangent and cotangents by plain `jax.jvp` and `jax.vjp`."""
        rows = rows_of(fn)
        return [x for row in self.case.offered for x in rows[row](at)]

    def offered(self, found: dict[str, Any]) -> list[Any]:
        """The same, of the rows of a `Side`."""
        return [x for row in self.case.offered for x in unless_error(found[row])]

    @ft.cached_property
    def eager(self) -> list[Any]:
        calls = [self.case.eager(mode) for mode in list(self.case.offered)[1:]]
        found = [d for call in calls for d in unless_error(call.derivative)]
        return list(map(np.asarray, (*self.f(*self.leaves), *found)))

    def stacked(self, kept: Sequence[int], scales: Sequence[float] = (1.0,) * 3) -> list[Any]:
        """Where the leaves in `kept` and its directions belong to one example."""
        times = lambda v, s: v * v.dtype.type(s)
        rows = []
        for example, scale in zip(self.examples, scales, strict=True):
            x = fill(self.leaves, kept, [example[i] for i in kept])
            t = fill(self.t, kept, [times(self.t[i], scale) for i in kept])
            w = [times(v, scale) for v in self.w]
            rows.append(self.offered(self.case.own.derive(At(x, t, w))))
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def of_batch(self, kept: Sequence[int]) -> list[Any]:
        """The derivative of a batch: cotangents of unbatched leaves are summed."""
        columns = self.stacked(kept, _ALONG)
        for i in range(-len(self.t), 0) if "vjp" in self.case.offered else ():
            if i + len(self.t) not in kept:
                columns[i] = columns[i].sum(0)
        return columns


def transforms(case: Case) -> Iterator[Finding]:
    """Compare every transformation with the rule without one."""
    e = _Examples(case)
    trials = [*_programs(case, e), *_batches(case, e)]
    names = [f"{kind} of {name}" for kind, of in case.offered.values() for name in of]
    # By number: two subsets of many leaves have the same name. The first one is the program of
    # the other checks.
    rows = {f"trial {i}": run for i, (_, run, _) in enumerate(trials[1:])}
    found = case.own.compute(rows, e.at).values()
    results = [outcome(e.offered, case.own_derivatives), *found]
    ways = {"jvp expected": e.t, "vjp expected": e.w}
    measured = max(case.measured(row, [way]) for row, way in ways.items())
    for (name, _, expected), got in zip(trials, results, strict=True):
        want = outcome(expected)
        if isinstance(want, Exception) and not isinstance(got, Exception):
            cause = "the rule raises at other arguments, where the function does not"
            yield broke(name, want, cause)
        else:
            note = f"right eagerly, wrong under {name}"
            yield compare(name, want, got, names, case.own.tolerance + measured, note=note)


def _programs(case: Case, e: _Examples) -> Iterator[_Trial]:
    zeros = lambda *xs: [jnp.zeros_like(out) for out in e.f(*xs)]
    # A traced `True`, so that both branches are kept.
    is_true = lambda: jnp.sum(jnp.arange(3)) == 3
    ways = {
        "jit of the derivative": e.f,
        "jit around the function": _jitted(case.subject),
        "jax.checkpoint": jax.checkpoint(e.f, policy=jax.checkpoint_policies.nothing_saveable),
        "cond": lambda *xs: jax.lax.cond(is_true(), e.f, zeros, *xs),
        "jit in a scan, closed over": lambda *xs: [
            y[0] for y in jax.lax.map(lambda _: jax.jit(lambda: e.f(*xs))(), jnp.zeros(1))
        ],
    }
    for name, fn in ways.items():
        yield name, ft.partial(e.derive, fn), lambda: e.eager


def _jitted(subject: FlatFunction):
    """As `eqx.filter_jit`, whose own cache holds functions for ever: all arrays are traced,
    integers and keys too."""

    def call(*xs):
        jit = lambda run, arrays: jax.jit(run)(arrays)
        out = call_on_arrays(jit, *subject.tree(xs), subject.kwargs)
        return list(filter(is_output, jax.tree.leaves(out)))

    return call


def _batches(case: Case, e: _Examples) -> Iterator[_Trial]:
    """Each subset of the arguments, inside and outside of the derivative."""
    groups = list(dict.fromkeys(case.subject.groups))
    n = len(groups)
    sizes = range(1, n + 1) if n <= _ALL_SUBSETS else (1, n)
    for chosen in (s for size in sizes for s in itertools.combinations(groups, size)):
        kept = [i for i, group in enumerate(case.subject.groups) if group in chosen]
        label = ", ".join(case.names[i] for i in kept[:3]) + (", ..." if kept[3:] else "")
        if e.move == _MOVES[-1]:
            label += " (equal examples: at others, the function raises)"
        axes = [0 if i in kept else None for i in range(len(e.t))]
        inside = lambda at, kept=kept, axes=axes: jax.vmap(
            lambda *xs: e.derive(e.f, at._replace(x=xs)), in_axes=axes
        )(*_batch(at, kept).x)
        outside = lambda at, kept=kept, axes=axes: e.derive(
            jax.vmap(e.f, in_axes=axes), _batch(at, kept)
        )
        yield f"vmap of the derivative, over {label}", inside, ft.partial(e.stacked, kept)
        yield f"derivative of vmap, over {label}", outside, ft.partial(e.of_batch, kept)
    loop = lambda *many: jax.lax.map(lambda xs: e.f(*xs), many)
    every = range(len(e.t))
    yield "scan", lambda at: e.derive(loop, _batch(at, every)), ft.partial(e.of_batch, every)


def _batch(at: At, kept: Sequence[int]) -> At:
    """The leaves in `kept` and their tangents are a batch, and the cotangents."""
    spread = lambda x: jnp.stack([x * x.dtype.type(scale) for scale in _ALONG])
    t = [spread(x) if i in kept else x for i, x in enumerate(at.t)]
    x = fill(at.x, kept, [at.many[i] for i in kept])
    return at._replace(x=x, t=t, w=list(map(spread, at.w)))
