"""The check `transforms`: the same results under every transformation as without one.

The rule is compared with itself, so no other reference is needed: with eager calls at the
arguments, and with the compiled derivative at the examples of a batch.
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
from .._rules.tree_split import TreeSplit
from ._case import Case
from ._mistakes import PRECISION
from ._oracle import At, compiled, unless_error
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
    """The examples of a batch, and the derivatives at them."""

    def __init__(self, case: Case):
        self.case, self.f, self.leaves = case, case.own.f, case.subject.leaves
        self.forward, self.reverse = case.has_forward, case.has_reverse
        self.rows = ["f", *["jvp"] * self.forward, *["vjp"] * self.reverse]
        self.t, self.w = case.first.tangents[0], case.first.cotangents[0]
        for self.move in _MOVES:
            self.examples = [[_scaled(x, k) for x in self.leaves] for k in self.move]
            runs = (outcome(case.own.value, xs) for xs in self.examples)
            if not any(isinstance(x, Exception) for x in runs):
                break
        many = [np.stack(column) for column in zip(*self.examples, strict=True)]
        self.at = At(self.leaves, self.t, self.w, many)
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
        calls = [self.case.eager(mode) for mode in self.rows[1:]]
        outputs = calls[-1].outputs if calls else self.f(*self.leaves)
        found = [d for call in calls for d in unless_error(call.derivative)]
        return [np.asarray(x) for x in (*outputs, *found)]

    def at_example(self, kept: Sequence[int], k: int, scale: float = 1.0) -> list[Any]:
        """Where the leaves in `kept` are those of an example, and so are its directions."""
        x = [self.examples[k if i in kept else 0][i] for i in range(len(self.t))]
        times = lambda v, s: v * v.dtype.type(s)
        t = [times(v, scale) if i in kept else v for i, v in enumerate(self.t)]
        found = self.case.own.derive(t, [times(v, scale) for v in self.w], x)
        return [y for name in self.rows for y in unless_error(found[name])]

    def stacked(self, kept: Sequence[int], scales: Sequence[float] = (1.0,) * _N) -> list[Any]:
        rows = [self.at_example(kept, k, scale) for k, scale in enumerate(scales)]
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def of_batch(self, kept: Sequence[int]) -> list[Any]:
        """The derivative of a batch: cotangents of unbatched leaves are summed."""
        columns = self.stacked(kept, _ALONG)
        first = len(columns) - len(self.t)
        for i in range(len(self.t) if self.reverse else 0):
            if i not in kept:
                x = columns[first + i]
                columns[first + i] = x.sum(0, dtype=x.dtype)
        return columns


def _scaled(x: Any, factor: float) -> np.ndarray:
    # Far enough for the dtype, in which a small move may be none.
    least = 4 * float(jnp.finfo(x.dtype).eps)
    move = np.sign(factor - 1) * max(abs(factor - 1), least) if factor != 1 else 0.0
    return (np.asarray(x) * (1 + move)).astype(x.dtype)


def transforms(case: Case) -> Iterator[Finding]:
    """Compare every transformation with the rule without one."""
    if not case.outputs:
        return
    examples = _Examples(case)
    trials = [*_programs(case, examples), *_batches(case, examples)]
    trials += _scans(examples) if examples.reverse else []
    rows = {f"trial {i}": trial.run for i, trial in enumerate(trials)}
    results = list(case.own.compute(rows, examples.at).values())
    # XLA kills the process if a host function raises while another device waits for it.
    if len(jax.devices()) > 1 and not any(isinstance(x, Exception) for x in results):
        stacked = outcome(examples.stacked, range(len(case.names)))
        if not isinstance(stacked, Exception):
            sharded = ft.partial(_sharded, examples)
            first_two = lambda: [x[:2] for x in stacked]
            trials.append(_Trial("sharding over two devices", sharded, first_two))
            results.append(outcome(sharded, examples.at))
    for trial, got in zip(trials, results, strict=True):
        want = outcome(trial.want)
        if isinstance(got, Exception):
            yield broke(
                "transforms", trial.name, got, f"right eagerly, fails under {trial.name}"
            )
        elif isinstance(want, Exception):
            cause = "the rule raises at other arguments, where the function does not"
            yield broke("transforms", trial.name, want, cause)
        else:
            yield _compare(case, examples, trial, want, got)


def _compare(case: Case, examples: _Examples, trial: _Trial, want, got) -> Finding:
    names = examples.names[: len(want)] if trial.is_value else examples.names
    if len(want) != len(names):
        names = [f"result {i}" for i in range(len(want))]
    wider = lambda: max(
        case.measured(case.noise(f"{row} 0", way))
        for row, way in zip(("jvp", "vjp"), (examples.t, examples.w), strict=True)
    )
    note = f"right eagerly, wrong under {trial.name}"
    finding = compare("transforms", trial.name, want, got, names, case.own.tolerance,
                      wider=wider, note=note)  # fmt: skip
    if finding.verdict == FAILED and PRECISION in finding.cause:
        facts = finding.facts.replace(f"\n  {note}", "")
        return dataclasses.replace(finding, cause=_ROUNDED.format(trial.name), facts=facts)
    if finding.verdict == FAILED and trial.is_value:
        return dataclasses.replace(finding, cause=_vmap_method(case) or finding.cause)
    return finding


def _vmap_method(case: Case) -> str:
    """What `vmap_method` asks of a host function, if it is called with whole batches."""
    found = equations(case.own.program) if case.own.program else ()
    methods = [e.params.get("vmap_method") for e in found if "callback" in e.primitive.name]
    method = next((m for m in methods if m not in (None, "sequential")), None)
    text = "the host function gets the whole batch in one call"
    return f"with `vmap_method={method!r}` {text}" if method else ""


def _programs(case: Case, e: _Examples) -> Iterator[_Trial]:
    ways = {
        "jit of the derivative": e.f,
        "jit around the function": jax.jit(e.f),
        "filter_jit": _filter_jitted(case.subject),
        "jax.checkpoint": jax.checkpoint(e.f, policy=jax.checkpoint_policies.nothing_saveable),
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
        rest, arrays = TreeSplit.split(tree, eqx.is_array)

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
        at_each = ft.partial(e.stacked, kept)
        values = lambda at_each=at_each: at_each()[: len(case.outputs)]
        value, inside, outside = (ft.partial(fn, e, kept) for fn in (_value, _inside, _outside))
        yield _Trial(f"vmap, over {label}", value, values, True)
        yield _Trial(f"vmap of the derivative, over {label}", inside, at_each)
        yield _Trial(f"derivative of vmap, over {label}", outside, ft.partial(e.of_batch, kept))


def _mapped(fn, at: At, kept: Sequence[int]) -> tuple[Callable[..., Any], list[Any]]:
    """`fn` under `vmap`, and its leaves: those in `kept` are a batch."""
    n = range(len(at.x))
    axes = [0 if i in kept else None for i in n]
    return jax.vmap(fn, in_axes=axes), [(at.many if i in kept else at.x)[i] for i in n]


def _value(e: _Examples, kept: Sequence[int], at: At):
    mapped, batch = _mapped(e.f, at, kept)
    return mapped(*batch)


def _inside(e: _Examples, kept: Sequence[int], at: At):
    mapped, batch = _mapped(lambda *xs: e.derive(e.f, xs, at), at, kept)
    return mapped(*batch)


def _outside(e: _Examples, kept: Sequence[int], at: At):
    mapped, batch = _mapped(e.f, at, kept)
    spread = lambda x: jnp.stack([x * x.dtype.type(scale) for scale in _ALONG])
    t = [spread(x) if i in kept else x for i, x in enumerate(at.t)]
    return e.derive(mapped, batch, at._replace(t=t, w=[spread(x) for x in at.w]))


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
        cts = e.stacked(range(len(e.t)))[len(e.eager) - len(e.t) :]
        total = [x[0] * np.asarray(_N, jnp.finfo(x.dtype).dtype) for x in cts]
        return [*cts, *total, *total, np.asarray(_N)]

    yield _Trial("scan", ft.partial(run, loss), want)
    yield _Trial("grad of jit of scan", ft.partial(run, jax.jit(loss)), want)


def _sharded(e: _Examples, at: At):
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    spread = NamedSharding(mesh, PartitionSpec("batch"))
    batch = [jax.device_put(x[:2], spread) for x in at.many]
    out = compiled(jax.vmap(lambda *xs: e.derive(e.f, xs, at)))(*batch)
    return [np.asarray(x) for x in out]
