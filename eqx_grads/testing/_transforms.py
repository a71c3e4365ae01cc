"""The check `transforms`: the same results under every transformation as in eager calls.

Eager calls compute value, tangent and cotangents, and every transformation has to return the
same. The rule is compared with itself, so no other reference is needed.
"""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._jaxprs.structure import equations
from ._case import Case
from ._mistakes import PRECISION
from ._oracle import At, compiled
from ._outcome import outcome
from ._report import broke, compare, FAILED, Finding
from ._subject import FlatFunction, is_output


# What the leaves are multiplied with in the examples of a batch. The first of these at which
# the function does not raise an error: its domain may have an end close by.
_MOVES = ((1.0, 0.97, 0.94), (1.0, 1.03, 1.06), (1.0, 0.9999, 1.0001), (1.0, 1.0, 1.0))
_N = 3
# What the tangents and cotangents are multiplied with, in the derivative of a batch: examples
# that are mixed show there, also if they are equal.
_ALONG = (1.0, 0.5, 2.0)
_ALL_SUBSETS = 3  # of the arguments, for `vmap`
_SHARDING = "sharding over two devices"
_ROUNDED = (
    "eagerly and under {}, the results are rounded differently: one of them is cast to lower "
    "precision, or the rule amplifies rounding, as a difference of nearly equal numbers does"
)


class _Trial(NamedTuple):
    """A transformation: `run(at)` should return `want()`."""

    name: str
    run: Callable[[At], Any]
    want: Callable[[], Any]
    is_value: bool = False


class _Examples:
    """The derivatives at the examples of a batch: the compiled derivative, which has to agree
    with eager calls at the arguments."""

    def __init__(self, case: Case):
        self.case, self.f = case, case.own.f
        self.forward, self.reverse = case.has_forward, case.has_reverse
        self.t = [np.asarray(t) for t in case.eager.tangents]
        self.w = [np.asarray(w) for w in case.eager.cotangents]
        self.moves = _where_defined(case)
        leaves = case.subject.leaves
        self.examples = [
            [_scaled(x, move[k]) for x, move in zip(leaves, self.moves, strict=True)]
            for k in range(_N)
        ]
        many = [np.stack(column) for column in zip(*self.examples, strict=True)]
        self.at = At(leaves, self.t, self.w, many)
        names = [f"value of {name}" for name in case.output_names]
        names += [f"tangent of {n}" for n in case.output_names if self.forward]
        self.names = names + [f"cotangent of {n}" for n in case.names if self.reverse]

    def derive(self, fn: Callable[..., Any], leaves: Sequence[Any], at: At) -> list[Any]:
        """Value, tangent and cotangents by plain `jax.jvp` and `jax.vjp`."""
        out, tangents, cotangents = [], [], []
        if self.forward:
            out, tangents = jax.jvp(fn, list(leaves), list(at.t))
        if self.reverse:
            out, pull = jax.vjp(fn, *leaves)
            cotangents = list(pull(list(at.w)))
        return [*(out if self.forward or self.reverse else fn(*leaves)), *tangents, *cotangents]

    @ft.cached_property
    def eager(self) -> list[Any]:
        calls = [self.case.eager.jvp()] if self.forward else []
        calls += [self.case.eager.vjp()] if self.reverse else []
        outputs = calls[-1].outputs if calls else self.f(*self.case.subject.leaves)
        return [np.asarray(x) for x in (*outputs, *(d for c in calls for d in c.derivative))]

    def at_example(self, kept: Sequence[int], k: int, scale: float = 1.0) -> list[Any]:
        """Where the leaves in `kept` are those of an example, and so are its directions."""
        n = range(len(self.t))
        x = [self.examples[k if i in kept else 0][i] for i in n]
        times = lambda v, s: v * v.dtype.type(s)
        t = [times(v, scale) if i in kept else v for i, v in enumerate(self.t)]
        found = self.case.own.derive(t, [times(v, scale) for v in self.w], x)
        needed = ["f", *["jvp"] * self.forward, *["vjp"] * self.reverse]
        for result in map(found.get, needed):
            if isinstance(result, Exception):
                raise result
        return [y for name in needed for y in found[name]]

    def stacked(self, kept: Sequence[int]) -> list[Any]:
        rows = [self.at_example(kept, k) for k in range(_N)]
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def of_batch(self, kept: Sequence[int]) -> list[Any]:
        """The derivative of a batch: cotangents of unbatched leaves are summed."""
        rows = [self.at_example(kept, k, scale) for k, scale in enumerate(_ALONG)]
        columns = [np.stack(column) for column in zip(*rows, strict=True)]
        first = len(columns) - len(self.t)
        for i in range(len(self.t) if self.reverse else 0):
            if i not in kept:
                x = columns[first + i]
                columns[first + i] = x.sum(0, dtype=x.dtype)
        return columns


def _where_defined(case: Case) -> list[Sequence[float]]:
    """For each leaf, the first moves at which the function raises no error, whatever its rule
    does there: those of one argument after the other."""
    groups, leaves = case.subject.groups, case.subject.leaves
    moves: list[Sequence[float]] = [_MOVES[-1]] * len(leaves)
    for group in dict.fromkeys(groups):
        for move in _MOVES:
            tried = [move if g == group else m for g, m in zip(groups, moves, strict=True)]
            if _is_defined(case, tried):
                moves = tried
                break
    # It may have nothing to do with these arguments.
    return moves if _is_defined(case, moves) else [_MOVES[0]] * len(leaves)


def _is_defined(case: Case, moves: Sequence[Sequence[float]]) -> bool:
    for kept in _batched_leaves(case):
        for k in range(_N):
            xs = [
                _scaled(x, moves[i][k]) if i in kept else np.asarray(x)
                for i, x in enumerate(case.subject.leaves)
            ]
            if isinstance(outcome(case.own.value, xs), Exception):
                return False
    return True


def _scaled(x: Any, factor: float) -> np.ndarray:
    # Far enough for the dtype, in which a small move may be none.
    least = 4 * float(jnp.finfo(x.dtype).eps)
    move = factor - 1
    move = np.sign(move) * max(abs(move), least) if move else 0.0
    return (np.asarray(x) * (1 + move)).astype(x.dtype)


def transforms(case: Case) -> Iterator[Finding]:
    """Compare every transformation with eager calls."""
    if not case.outputs:
        return
    examples = _Examples(case)
    trials = [*_programs(case, examples), *_batches(case, examples)]
    trials += _scans(examples) if examples.reverse else []
    rows = {f"trial {i}": trial.run for i, trial in enumerate(trials)}
    found = case.own.compute(rows, examples.at)
    results = list(zip(trials, found.values(), strict=True))
    if len(jax.devices()) > 1:
        every = range(len(case.names))
        stacked = outcome(examples.stacked, every)
        # XLA kills the process if a host function raises while another device waits for it.
        if not any(isinstance(x, Exception) for x in (stacked, *found.values())):
            first_two = lambda: [x[:2] for x in stacked]
            sharded = ft.partial(_sharded, examples)
            trial = _Trial(_SHARDING, sharded, first_two)
            results.append((trial, outcome(sharded, examples.at)))
    for trial, got in results:
        if isinstance(got, Exception):
            cause = f"right eagerly, fails under {trial.name}"
            yield broke("transforms", trial.name, got, cause)
            continue
        want = outcome(trial.want)
        if isinstance(want, Exception):
            cause = "the rule raises at other arguments, where the function does not"
            yield broke("transforms", trial.name, want, cause)
            continue
        yield _compare(case, examples, trial, want, got)


def _compare(case: Case, examples: _Examples, trial: _Trial, want, got) -> Finding:
    names = examples.names[: len(want)] if trial.is_value else examples.names
    if len(want) != len(names):
        names = [f"result {i}" for i in range(len(want))]
    ways = [("jvp 0", case.eager.tangents, case.output_names)] if case.has_forward else []
    ways += [("vjp 0", case.eager.cotangents, case.names)] if case.has_reverse else []
    wider = lambda: max((case.measured(*way) for way in ways), default=0.0)
    tolerance = case.own.tolerance
    note = f"right eagerly, wrong under {trial.name}"
    finding = compare(
        "transforms", trial.name, want, got, names, tolerance, wider=wider, note=note
    )
    if finding.verdict != FAILED:
        return finding
    if PRECISION in finding.cause:
        rounded = _ROUNDED.format(trial.name)
        facts = finding.facts.replace(f"\n  {note}", "")
        return dataclasses.replace(finding, cause=rounded, facts=facts)
    method = _vmap_method(case) if trial.is_value else ""
    return dataclasses.replace(finding, cause=method or finding.cause)


def _vmap_method(case: Case) -> str:
    """What `vmap_method` asks of a host function, if it is called with whole batches."""
    found = list(equations(jax.make_jaxpr(case.subject.arrays)(*case.subject.leaves)))
    methods = [e.params.get("vmap_method") for e in found if "callback" in e.primitive.name]
    method = next((m for m in methods if m not in (None, "sequential")), None)
    text = "the host function gets the whole batch in one call"
    return f"with `vmap_method={method!r}` {text}" if method else ""


def _programs(case: Case, e: _Examples) -> Iterator[_Trial]:
    nothing = jax.checkpoint(e.f, policy=jax.checkpoint_policies.nothing_saveable)
    ways = {
        "jit of the derivative": e.f,
        "jit around the function": jax.jit(e.f),
        "filter_jit": _filter_jitted(case.subject),
        "jax.checkpoint": nothing,
        "cond": lambda *xs: jax.lax.cond(
            jnp.sum(jnp.arange(3)) == 3,  # a traced `True`, so that both branches are kept
            e.f,
            lambda *ys: [jnp.zeros_like(out) for out in e.f(*ys)],
            *xs,
        ),
    }
    for name, fn in ways.items():
        yield _Trial(name, lambda at, fn=fn: e.derive(fn, at.x, at), lambda: e.eager)


def _filter_jitted(subject: FlatFunction):
    """As `eqx.filter_jit`, whose own cache holds functions for ever: all arrays are traced,
    integers and keys too."""

    def call(*xs):
        tree = *subject.tree(xs), subject.kwargs
        dynamic, static = eqx.partition(tree, eqx.is_array)

        def run(dynamic):
            fn, args, kwargs = eqx.combine(dynamic, static)
            return list(filter(is_output, jax.tree.leaves(fn(*args, **kwargs))))

        return jax.jit(run)(dynamic)

    return call


def _batched_leaves(case: Case) -> Iterator[list[int]]:
    """Each subset of the arguments."""
    groups = list(dict.fromkeys(case.subject.groups))
    subsets = [*((g,) for g in groups[:6]), tuple(groups)]
    if len(groups) <= _ALL_SUBSETS:
        sizes = range(1, len(groups) + 1)
        subsets = [s for size in sizes for s in itertools.combinations(groups, size)]
    for chosen in subsets:
        yield [i for i, group in enumerate(case.subject.groups) if group in chosen]


def _batches(case: Case, e: _Examples) -> Iterator[_Trial]:
    """Inside and outside of the derivative."""
    for kept in _batched_leaves(case):
        label = ", ".join(case.names[i] for i in kept[:3]) + (", ..." if kept[3:] else "")
        if all(e.moves[i] == _MOVES[-1] for i in kept):
            label += " (equal examples: at others, the function raises)"
        at_each = ft.partial(e.stacked, kept)
        values = lambda at_each=at_each: at_each()[: len(case.outputs)]
        of_batch = ft.partial(e.of_batch, kept)
        yield _Trial(f"vmap, over {label}", ft.partial(_batched_value, e, kept), values, True)
        inside, outside = (ft.partial(fn, e, kept) for fn in (_inside, _outside))
        yield _Trial(f"vmap of the derivative, over {label}", inside, at_each)
        yield _Trial(f"derivative of vmap, over {label}", outside, of_batch)


def _batch(at: At, kept: Sequence[int]) -> tuple[list[Any], list[int | None]]:
    """The leaves, those in `kept` batched, and the axes of the batch."""
    pairs = enumerate(zip(at.many, at.x, strict=True))
    leaves = [many if i in kept else one for i, (many, one) in pairs]
    return leaves, [0 if i in kept else None for i in range(len(leaves))]


def _batched_value(e: _Examples, kept: Sequence[int], at: At):
    batch, axes = _batch(at, kept)
    return jax.vmap(e.f, in_axes=axes)(*batch)


def _inside(e: _Examples, kept: Sequence[int], at: At):
    batch, axes = _batch(at, kept)
    return jax.vmap(lambda *xs: e.derive(e.f, xs, at), in_axes=axes)(*batch)


def _outside(e: _Examples, kept: Sequence[int], at: At):
    batch, axes = _batch(at, kept)
    spread = lambda x: jnp.stack([x * x.dtype.type(scale) for scale in _ALONG])
    t = [spread(x) if axis == 0 else x for x, axis in zip(at.t, axes, strict=True)]
    along = at._replace(t=t, w=[spread(x) for x in at.w])
    return e.derive(jax.vmap(e.f, in_axes=axes), batch, along)


def _scans(e: _Examples) -> Iterator[_Trial]:
    """Leaves that are scanned over, closed over, and carried, beside a counter and a key."""
    real = jnp.finfo(e.w[0].dtype).dtype

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

    def run(loss, at):
        gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        grads, count = gradient(list(at.many), list(at.x), list(at.x), list(at.w))
        return [*jax.tree.leaves(grads), count]

    def want():
        first = len(e.eager) - len(e.t)
        cts = [e.at_example(range(len(e.t)), k)[first:] for k in range(_N)]
        each = [np.stack(column) for column in zip(*cts, strict=True)]
        total = [x * np.asarray(_N, jnp.finfo(x.dtype).dtype) for x in cts[0]]
        return [*each, *total, *total, np.asarray(_N)]

    yield _Trial("scan", ft.partial(run, loss), want)
    yield _Trial("grad of jit of scan", ft.partial(run, jax.jit(loss)), want)


def _sharded(e: _Examples, at: At):
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    spread = NamedSharding(mesh, PartitionSpec("batch"))
    batch = [jax.device_put(x[:2], spread) for x in at.many]
    out = compiled(jax.vmap(lambda *xs: e.derive(e.f, xs, at)))(*batch)
    return [np.asarray(x) for x in out]
