"""The check `transforms`: the same results under every transformation as without one.

The rule is compared with itself, so no other reference is needed: with eager calls at the
arguments, and with the compiled derivative at the examples of a batch.
"""

import functools as ft
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._jaxprs.operands import fill
from .._rules.tree_split import TreeSplit
from ._case import Case
from ._oracle import At, jvp, unless_error, vjp
from ._outcome import outcome
from ._report import broke, compare, Finding
from ._subject import FlatFunction, is_output


# The factors of the leaves in the examples of a batch; equal factors where the function raises
# an error at others: its domain may have an end close by.
_MOVES = ((1.0, 0.97, 0.94), (1.0, 1.0, 1.0))
_N = 3
# The factors of tangents and cotangents in the derivative of a batch: mixed-up examples show
# there, even if they are equal.
_ALONG = (1.0, 0.5, 2.0)
_ALL_SUBSETS = 3  # of the arguments, for `vmap`


class _Trial(NamedTuple):
    """A transformation: `run(at)` should return `want()`."""

    name: str
    run: Callable[[At], Any]
    want: Callable[[], Any]


class _Examples:
    """The examples of a batch, and the value and the derivatives at them."""

    def __init__(self, case: Case):
        self.case, self.f, self.leaves = case, case.own.f, case.subject.leaves
        self.t, self.w = case.tangents[0], case.cotangents[0]
        outs = case.output_names
        kinds = {"f": ("value", outs)}
        kinds |= {"jvp": ("tangent", outs)} if case.has_forward else {}
        kinds |= {"vjp": ("cotangent", case.names)} if case.has_reverse else {}
        self.rows = list(kinds)
        self.names = [f"{kind} of {name}" for kind, names in kinds.values() for name in names]
        for self.move in _MOVES:
            self.examples = [[_scaled(x, k) for x in self.leaves] for k in self.move]
            runs = (case.own.derive(self.t, self.w, xs)["f"] for xs in self.examples)
            if not any(isinstance(x, Exception) for x in runs):
                break
        many = [np.stack(column) for column in zip(*self.examples, strict=True)]
        self.at = At(self.leaves, self.t, self.w, many)

    def derive(self, fn: Callable[..., Any], leaves: Sequence[Any], at: At) -> list[Any]:
        """Value, tangent and cotangents by plain `jax.jvp` and `jax.vjp`."""
        derived = {"f": lambda: fn(*leaves), "jvp": lambda: jvp(fn, leaves, at.t),
                   "vjp": lambda: vjp(fn, leaves, at.w)}  # fmt: skip
        return [x for row in self.rows for x in derived[row]()]

    @ft.cached_property
    def eager(self) -> list[Any]:
        calls = [self.case.eager(mode) for mode in self.rows[1:]]
        outputs = calls[-1].outputs if calls else self.f(*self.leaves)
        found = [d for call in calls for d in unless_error(call.derivative)]
        return [np.asarray(x) for x in (*outputs, *found)]

    def stacked(self, kept: Sequence[int], scales: Sequence[float] = (1.0,) * _N) -> list[Any]:
        """Where the leaves in `kept` and its directions belong to one example."""
        times = lambda v, s: v * v.dtype.type(s)
        rows = []
        for k, scale in enumerate(scales):
            x = [self.examples[k if i in kept else 0][i] for i in range(len(self.t))]
            t = [times(v, scale) if i in kept else v for i, v in enumerate(self.t)]
            found = self.case.own.derive(t, [times(v, scale) for v in self.w], x)
            rows.append([y for name in self.rows for y in unless_error(found[name])])
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def of_batch(self, kept: Sequence[int]) -> list[Any]:
        """The derivative of a batch: cotangents of unbatched leaves are summed."""
        columns = self.stacked(kept, _ALONG)
        for i in range(-len(self.t), 0) if "vjp" in self.rows else ():
            if i + len(self.t) not in kept:
                columns[i] = columns[i].sum(0, dtype=columns[i].dtype)
        return columns


def _scaled(x: Any, factor: float) -> np.ndarray:
    # Far enough for the dtype, in which a small move may be none.
    least = 4 * float(jnp.finfo(x.dtype).eps)
    return (np.asarray(x) * min(factor, 1 - least if factor < 1 else 1)).astype(x.dtype)


def transforms(case: Case) -> Iterator[Finding]:
    """Compare every transformation with the rule without one."""
    if not case.outputs:
        return
    e = _Examples(case)
    trials = [*_programs(case, e), *_batches(case, e), *_scan(e)]
    # By number: two subsets of many leaves have the same name.
    rows = {f"trial {i}": trial.run for i, trial in enumerate(trials)}
    results = case.own.compute(rows, e.at).values()
    ways = {"jvp expected": e.t, "vjp expected": e.w}
    wider = lambda: max(case.measured(case.noise(row, way)) for row, way in ways.items())
    for (name, _, expected), got in zip(trials, results, strict=True):
        want = outcome(expected)
        if isinstance(got, Exception):
            yield broke("transforms", name, got, f"right eagerly, fails under {name}")
        elif isinstance(want, Exception):
            cause = "the rule raises at other arguments, where the function does not"
            yield broke("transforms", name, want, cause)
        else:
            names = e.names if name != "scan" else [f"result {i}" for i in range(len(want))]
            yield compare("transforms", name, want, got, names, case.own.tolerance,
                          wider=wider,
                          note=f"right eagerly, wrong under {name}")  # fmt: skip


def _programs(case: Case, e: _Examples) -> Iterator[_Trial]:
    zeros = lambda *xs: [jnp.zeros_like(out) for out in e.f(*xs)]
    # A traced `True`, so that both branches are kept.
    is_true = lambda: jnp.sum(jnp.arange(3)) == 3
    ways = {
        "jit of the derivative": e.f,
        "jit around the function": _jitted(case.subject),
        "jax.checkpoint": jax.checkpoint(e.f, policy=jax.checkpoint_policies.nothing_saveable),
        "cond": lambda *xs: jax.lax.cond(is_true(), e.f, zeros, *xs),
    }
    for name, fn in ways.items():
        yield _Trial(name, lambda at, fn=fn: e.derive(fn, at.x, at), lambda: e.eager)


def _jitted(subject: FlatFunction):
    """As `eqx.filter_jit`, whose own cache holds functions for ever: all arrays are traced,
    integers and keys too."""

    def call(*xs):
        rest, arrays = TreeSplit.split((*subject.tree(xs), subject.kwargs), eqx.is_array)

        def run(arrays):
            fn, args, kwargs = rest.tree(arrays)
            return list(filter(is_output, jax.tree.leaves(fn(*args, **kwargs))))

        return jax.jit(run)(arrays)

    return call


def _batches(case: Case, e: _Examples) -> Iterator[_Trial]:
    """Each subset of the arguments, inside and outside of the derivative."""
    groups = list(dict.fromkeys(case.subject.groups))
    subsets = [*((g,) for g in groups[:6]), tuple(groups)]
    if len(groups) <= _ALL_SUBSETS:
        sizes = range(1, len(groups) + 1)
        subsets = [s for size in sizes for s in itertools.combinations(groups, size)]
    for chosen in subsets:
        kept = [i for i, group in enumerate(case.subject.groups) if group in chosen]
        label = ", ".join(case.names[i] for i in kept[:3]) + (", ..." if kept[3:] else "")
        if e.move == _MOVES[-1]:
            label += " (equal examples: at others, the function raises)"
        for name, derive, want in (
            (f"vmap of the derivative, over {label}", _inside, e.stacked),
            (f"derivative of vmap, over {label}", _outside, e.of_batch),
        ):
            yield _Trial(name, ft.partial(derive, e, kept), ft.partial(want, kept))


def _mapped(fn, at: At, kept: Sequence[int]) -> tuple[Callable[..., Any], list[Any]]:
    """`fn` under `vmap`, and its leaves: the leaves in `kept` are a batch."""
    axes = [0 if i in kept else None for i in range(len(at.x))]
    return jax.vmap(fn, in_axes=axes), fill(at.x, kept, [at.many[i] for i in kept])


def _inside(e: _Examples, kept: Sequence[int], at: At):
    mapped, batch = _mapped(lambda *xs: e.derive(e.f, xs, at), at, kept)
    return mapped(*batch)


def _outside(e: _Examples, kept: Sequence[int], at: At):
    mapped, batch = _mapped(e.f, at, kept)
    spread = lambda x: jnp.stack([x * x.dtype.type(scale) for scale in _ALONG])
    t = [spread(x) if i in kept else x for i, x in enumerate(at.t)]
    return e.derive(mapped, batch, at._replace(t=t, w=[spread(x) for x in at.w]))


def _scan(e: _Examples) -> Iterator[_Trial]:
    """Leaves that are scanned over, closed over, and carried, beside a counter and a key."""
    if "vjp" not in e.rows:
        return
    real = jnp.finfo(e.w[0].dtype).dtype

    @jax.jit
    def loss(stacked, closed, carried, weights):
        def pair(xs):
            pairs = zip(e.f(*xs), weights, strict=True)
            return jnp.asarray(sum(jnp.real(jnp.sum(out * w)) for out, w in pairs), real)

        def body(carry, xs):
            total, count, key, leaves = carry
            key, _ = jr.split(key)
            total = total + pair(xs) + pair(closed) + pair(leaves)
            return (total, count + 1, key, leaves), None

        init = (jnp.zeros((), real), jnp.zeros((), "int32"), jr.key(0), carried)
        (total, count, _, _), _ = jax.lax.scan(body, init, stacked)
        return total, count

    def run(at):
        gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        grads, count = gradient(list(at.many), list(at.x), list(at.x), list(at.w))
        return [*jax.tree.leaves(grads), count]

    def want():
        cts = e.stacked(range(len(e.t)))[-len(e.t) :]
        total = [x[0] * np.asarray(_N, jnp.finfo(x.dtype).dtype) for x in cts]
        return [*cts, *total, *total, np.asarray(_N)]

    yield _Trial("scan", run, want)
