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

from ..._jaxprs.structure import equations
from .._case import Case
from .._compiled import all_at_once, compiled
from .._findings import broke, compare
from .._likely_cause import PRECISION
from .._report import FAILED, Finding


# What the leaves are multiplied with in the examples of a batch. The first of these at which
# the function does not raise an error: its domain may have an end close by.
_MOVES = ((1.0, 0.97, 0.94), (1.0, 1.03, 1.06), (1.0, 0.9999, 1.0001), (1.0, 1.0, 1.0))
_N_EXAMPLES = 3
# What the tangents and cotangents are multiplied with, in the derivative of a batch: examples
# that are mixed show there, also if they are equal.
_ALONG = (1.0, 0.5, 2.0)
_ALL_SUBSETS = 3  # of the arguments, for `vmap`


class _Points(NamedTuple):
    """The arrays that the trials are made of. They are arguments of the compiled programs, as
    XLA would compute with constants while it compiles.

    - `leaves`: the arguments.
    - `stacked`: for each leaf, its values in the examples.
    - `t`, `w`: the tangents and the cotangents.
    """

    leaves: list[Any]
    stacked: list[Any]
    t: list[Any]
    w: list[Any]


class _Expected:
    """The results of calls that are not transformed, each a list of arrays: outputs, tangents,
    cotangents.

    At the arguments these are eager calls. At the other examples they are those of the compiled
    derivative, which has to agree with the eager calls.
    """

    def __init__(self, case: Case, moves: Sequence[Sequence[float]]):
        self.fn = lambda *xs: case.subject.arrays(*xs)
        self._moves = moves
        self.names = self._names(case)
        self.forward, self.reverse = case.offers_forward, case.offers_reverse
        self.n_outputs = len(case.own.outputs)
        self.eager = self._eager_call(case)
        leaves, t, w = case.subject.leaves, case.eager.tangents, case.eager.cotangents
        self.examples = [
            [_scaled(x, move[k]) for x, move in zip(leaves, moves, strict=True)]
            for k in range(_N_EXAMPLES)
        ]
        stacked = [np.stack(column) for column in zip(*self.examples, strict=True)]
        self.points = _Points(list(leaves), stacked, t, w)
        self._derive = compiled(lambda p: self.derive(self.fn, p.leaves, p))
        self._at: dict[tuple[int, ...], list[Any]] = {}

    def _names(self, case: Case) -> list[str]:
        names = [f"value of {name}" for name in case.output_names]
        names += [f"tangent of {n}" for n in case.output_names] if case.offers_forward else []
        return names + [f"cotangent of {n}" for n in case.names if case.offers_reverse]

    def _eager_call(self, case: Case) -> list[Any]:
        values, tangents, cotangents = [], [], []
        if self.forward:
            call = case.eager.jvp()
            values, tangents = call.outputs, call.derivative
        if self.reverse:
            call = case.eager.vjp()
            values, cotangents = call.outputs, call.derivative
        if not (self.forward or self.reverse):
            values = self.fn(*case.subject.leaves)
        return [np.asarray(x) for x in (*values, *tangents, *cotangents)]

    def derive(self, fn: Callable[..., Any], leaves: Sequence[Any], p: _Points) -> list[Any]:
        """Value, tangent and cotangents by plain `jax.jvp` and `jax.vjp`."""
        out, tangents, cotangents = [], [], []
        if self.forward:
            out, tangents = jax.jvp(fn, list(leaves), p.t)
        if self.reverse:
            out, pull = jax.vjp(fn, *leaves)
            cotangents = pull(p.w)
        if not (self.forward or self.reverse):
            out = fn(*leaves)
        return [*out, *tangents, *cotangents]

    def at(self, which: Sequence[int]) -> list[Any]:
        """Where each leaf is that of the example with this number."""
        key = tuple(which)
        if key not in self._at:
            leaves = [self.examples[k][i] for i, k in enumerate(key)]
            self._at[key] = [
                np.asarray(x) for x in self._derive(self.points._replace(leaves=leaves))
            ]
        return self._at[key]

    def rows(self, kept: Sequence[int]) -> list[list[Any]]:
        """For each example, the result where it is that of the leaves in `kept`."""
        n = len(self.points.leaves)
        numbers = range(_N_EXAMPLES)
        return [self.at([k if i in kept else 0 for i in range(n)]) for k in numbers]

    def are_equal(self, kept: Sequence[int]) -> bool:
        """Whether the function is not defined where the examples would differ."""
        return all(self._moves[i] == _MOVES[-1] for i in kept)

    def rows_along(self, kept: Sequence[int]) -> list[list[Any]]:
        """The same, where each example has a tangent and a cotangent of its own."""
        p, found = self.points, []
        for k, scale in enumerate(_ALONG):
            at = p._replace(
                leaves=[self.examples[k if i in kept else 0][i] for i in range(len(p.leaves))],
                t=[x * x.dtype.type(scale) if i in kept else x for i, x in enumerate(p.t)],
                w=[x * x.dtype.type(scale) for x in p.w],
            )
            found.append([np.asarray(x) for x in self._derive(at)])
        return found

    def per_example(self, kept: Sequence[int]) -> list[Any]:
        """The expected result of `vmap(derive)` with the leaves in `kept` batched."""
        return [np.stack(column) for column in zip(*self.rows(kept), strict=True)]

    def of_batch(self, kept: Sequence[int]) -> list[Any]:
        """The expected result of `derive(vmap)`: cotangents of unbatched leaves are summed."""
        columns = [np.stack(column) for column in zip(*self.rows_along(kept), strict=True)]
        n = len(self.points.leaves)
        first = len(columns) - n
        for i in range(n if self.reverse else 0):
            if i not in kept:
                columns[first + i] = columns[first + i].sum(0, dtype=columns[first + i].dtype)
        return columns


def _scaled(x, factor):
    # Far enough for the dtype, in which a small move may be none.
    least = 4 * float(jnp.finfo(x.dtype).eps)
    move = factor - 1
    move = np.sign(move) * max(abs(move), least) if move else 0.0
    return (np.asarray(x) * (1 + move)).astype(x.dtype)


class _Trial(NamedTuple):
    """A transformation: `run(points)` should return `want()`."""

    name: str
    run: Callable[[_Points], Any]
    want: Callable[[], Any]


def _where_defined(case: Case) -> _Expected:
    """For each group of leaves, the first moves at which the function alone, whatever its rule
    does there, raises no error."""
    groups, leaves = case.subject.groups, case.subject.leaves
    moves = [_MOVES[-1]] * len(leaves)
    for group in dict.fromkeys(groups):
        for move in _MOVES:
            tried = [move if g == group else m for g, m in zip(groups, moves, strict=True)]
            if _is_defined(case, tried):
                moves = tried
                break
    if not _is_defined(case, moves):  # it has nothing to do with these arguments
        moves = [_MOVES[0]] * len(leaves)
    return _Expected(case, moves)


def _is_defined(case: Case, moves: Sequence[Sequence[float]]) -> bool:
    leaves = case.subject.leaves
    try:
        for kept in _batched_leaves(case):
            for k in range(_N_EXAMPLES):
                xs = [
                    jnp.asarray(_scaled(x, moves[i][k])) if i in kept else x
                    for i, x in enumerate(leaves)
                ]
                case.own.plain.value_at(xs)
    except Exception:
        return False
    return True


def transforms(case: Case) -> Iterator[Finding]:
    """Compare every transformation with eager calls."""
    if not case.own.outputs or not case.subject.leaves:
        return
    expected = _where_defined(case)
    trials = [*_program_trials(case, expected), *_vmap_trials(case, expected)]
    trials += [*_scan_trials(expected)] if expected.reverse else []
    trials += _sharding_trials(expected)
    results = _run_all(trials, expected.points)
    is_broken = any(t.name == _JITTED and isinstance(got, Exception) for t, got in results)
    tolerance = case.tolerance_with_rounding()
    # The first value that is wrong under `vmap`, and the leaves for which values are.
    wrong: Finding | None = None
    batches: set[str] = set()
    for trial, got in results:
        cause = f"right eagerly, wrong under {trial.name}"
        if isinstance(got, Exception):
            yield broke(
                "transforms", trial.name, got, f"right eagerly, fails under {trial.name}"
            )
            continue
        try:
            want = trial.want()
        except Exception as e:
            if not is_broken:  # which a finding says already
                cause = "the rule raises at other arguments, where the function does not"
                yield broke("transforms", trial.name, e, cause)
            continue
        names = expected.names
        if len(want) != len(names):
            names = [f"result {i}" for i in range(len(want))]
        transformation, _, leaves = trial.name.partition(_OVER)
        is_value = transformation == "vmap"
        if is_value:
            names = expected.names[: len(want)]
        of_rounding = _OF_ROUNDING.format(trial.name)
        refine = lambda seen, _, is_value=is_value, of_rounding=of_rounding: (
            of_rounding if PRECISION in seen else seen + _of_batches(case) * is_value
        )
        finding = compare(
            "transforms", trial.name, want, got, names, *tolerance, cause=cause, refine=refine
        )
        if finding.verdict == FAILED and is_value:
            batches |= {leaves, _SHARDING}
            wrong = wrong or finding
        is_of_batch = (leaves or trial.name) in batches
        if finding.verdict == FAILED and wrong is not None and is_of_batch:
            finding = dataclasses.replace(finding, text=wrong.text)  # it has the same cause
        yield finding


_OF_ROUNDING = (
    "eagerly and under {}, the results are rounded differently: one of them is cast to lower "
    "precision, or the rule amplifies rounding, as a difference of nearly equal numbers does"
)


def _of_batches(case: Case) -> str:
    """What `vmap_method` asks of a host function, if it is called with whole batches."""
    found = list(equations(jax.make_jaxpr(case.subject.arrays)(*case.subject.leaves)))
    methods = [e.params.get("vmap_method") for e in found if "callback" in e.primitive.name]
    method = next((m for m in methods if m not in (None, "sequential")), None)
    if method is None:
        return ""
    text = "the host function gets the whole batch in one call"
    return f":\n  with `vmap_method={method!r}` {text}"


_OVER = ", over "
_JITTED = "jit of the derivative"
_SHARDING = "sharding over two devices"  # of a batch over all leaves


def _run_all(
    trials: Sequence[_Trial], points: _Points
) -> list[tuple[_Trial, list[Any] | Exception]]:
    """The trials, with their results. Most are compiled as one program, which is much faster
    than one by one."""
    by_name = {trial.name: trial for trial in trials}
    alone = [name for name in (_JITTED, _SHARDING) if name in by_name]
    together = [name for name in by_name if name not in alone]
    runs = [by_name[name].run for name in together]
    done = dict(zip(together, all_at_once(runs, (points,), eagerly=False), strict=True))
    for name in alone:
        # XLA kills the process if a host function raises while another device waits for it.
        is_safe = not any(isinstance(result, Exception) for result in done.values())
        is_safe = is_safe and _has_want(by_name[name])
        if name != _SHARDING or is_safe:
            done[name] = _attempt(by_name[name], points)
    return [(trial, done[name]) for name, trial in by_name.items() if name in done]


def _has_want(trial: _Trial) -> bool:
    """Whether the calls that are not transformed raise no error."""
    try:
        trial.want()
    except Exception:
        return False
    return True


def _attempt(trial: _Trial, points: _Points):
    try:
        return trial.run(points)
    except Exception as e:
        return e


def _program_trials(case: Case, e: _Expected) -> Iterator[_Trial]:
    want = lambda: e.eager
    checkpoint = jax.checkpoint(e.fn)
    nothing = jax.checkpoint(e.fn, policy=jax.checkpoint_policies.nothing_saveable)
    arguments = [0] * len(e.points.leaves)
    yield _Trial(_JITTED, lambda _: e.at(arguments), want)
    of = lambda fn: lambda p: e.derive(fn, p.leaves, p)
    yield _Trial("jit around the function", of(jax.jit(e.fn)), want)
    yield _Trial("filter_jit", of(_filter_jitted(case)), want)
    yield _Trial("jax.checkpoint", of(checkpoint), want)
    yield _Trial("jax.checkpoint with a policy", of(nothing), want)
    yield _Trial("cond", of(_in_cond(e.fn)), want)


def _sharding_trials(e: _Expected) -> Iterator[_Trial]:
    if len(jax.devices()) > 1:
        two = lambda: [x[:2] for x in e.per_example(range(len(e.points.leaves)))]
        yield _Trial(_SHARDING, lambda p: _sharded(e, p), two)


def _filter_jitted(case: Case):
    # Modules are arguments of the jitted function, with their static leaves. It returns leaves,
    # as Equinox would map bools over a user's class.
    call = eqx.filter_jit(lambda fn, args: jax.tree.leaves(fn(*args, **case.subject.kwargs)))

    def fn(*leaves):
        return list(filter(_is_inexact, call(*case.subject.tree(leaves))))

    return fn


def _is_inexact(x):
    return eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _in_cond(fn):
    def in_cond(*xs):
        nothing = lambda *ys: [jnp.zeros_like(out) for out in fn(*ys)]
        return jax.lax.cond(_traced_true(), fn, nothing, *xs)

    return in_cond


def _traced_true():
    """A traced `True`, so that `cond` keeps both branches."""
    return jnp.sum(jnp.arange(3)) == 3


def _sharded(e: _Expected, p: _Points):
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    spread = NamedSharding(mesh, PartitionSpec("batch"))
    batch = [jax.device_put(x[:2], spread) for x in p.stacked]
    return compiled(jax.vmap(lambda *xs: e.derive(e.fn, xs, p)))(*batch)


# ---------------------------------------------------------------- vmap


def _vmap_trials(case: Case, e: _Expected) -> Iterator[_Trial]:
    """Over each subset of the arguments, inside and outside of the derivative."""
    for kept in _batched_leaves(case):
        label = ", ".join(case.names[i] for i in kept[:3]) + (", ..." if kept[3:] else "")
        if e.are_equal(kept):
            label += " (equal examples: at others, the function raises)"
        yield _Trial(
            f"vmap{_OVER}{label}",
            ft.partial(_batched_value, e, kept),
            lambda kept=kept: e.per_example(kept)[: e.n_outputs],
        )
        yield _Trial(
            f"vmap of the derivative{_OVER}{label}",
            ft.partial(_batched_derivative, e, kept),
            lambda kept=kept: e.per_example(kept),
        )
        yield _Trial(
            f"derivative of vmap{_OVER}{label}",
            ft.partial(_derivative_of_batched, e, kept),
            lambda kept=kept: e.of_batch(kept),
        )


def _batched_leaves(case: Case) -> Iterator[list[int]]:
    groups = list(dict.fromkeys(case.subject.groups))
    for chosen in _subsets(groups):
        yield [i for i, group in enumerate(case.subject.groups) if group in chosen]


def _subsets(groups) -> list[tuple[int, ...]]:
    if len(groups) <= _ALL_SUBSETS:
        sizes = range(1, len(groups) + 1)
        return [s for size in sizes for s in itertools.combinations(groups, size)]
    return [*((g,) for g in groups[:6]), tuple(groups)]


def _batch(p: _Points, kept: Sequence[int]) -> tuple[list[Any], list[int | None]]:
    """The leaves, those in `kept` batched, and the axes of the batch."""
    axes = [0 if i in kept else None for i in range(len(p.leaves))]
    pairs = zip(p.stacked, p.leaves, axes, strict=True)
    return [many if axis == 0 else one for many, one, axis in pairs], axes


def _batched_value(e: _Expected, kept: Sequence[int], p: _Points):
    batch, axes = _batch(p, kept)
    return jax.vmap(e.fn, in_axes=axes)(*batch)


def _batched_derivative(e: _Expected, kept: Sequence[int], p: _Points):
    batch, axes = _batch(p, kept)
    return jax.vmap(lambda *xs: e.derive(e.fn, xs, p), in_axes=axes)(*batch)


def _derivative_of_batched(e: _Expected, kept: Sequence[int], p: _Points):
    batch, axes = _batch(p, kept)
    spread = lambda x: jnp.stack([x * x.dtype.type(scale) for scale in _ALONG])
    t = [spread(x) if axis == 0 else x for x, axis in zip(p.t, axes, strict=True)]
    along = p._replace(t=t, w=[spread(x) for x in p.w])
    return e.derive(jax.vmap(e.fn, in_axes=axes), batch, along)


# ---------------------------------------------------------------- scan


def _scan_trials(e: _Expected) -> Iterator[_Trial]:
    """Leaves that are scanned over, closed over, and carried, beside a counter and a key."""
    n = _N_EXAMPLES
    real = _real(e.points.w[0].dtype)

    def loss(stacked, closed, carried, weights):
        def pair(xs):
            pairs = zip(e.fn(*xs), weights, strict=True)
            terms = [jnp.real(jnp.sum(out * w)) for out, w in pairs]
            return sum(terms[1:], terms[0]).astype(real)

        def body(carry, xs):
            total, count, key, leaves = carry
            key, _ = jr.split(key)
            total = total + pair(xs) + pair(closed) + pair(leaves)
            return (total, count + 1, key, leaves), None

        init = (jnp.zeros((), real), jnp.zeros((), "int32"), jr.key(0), carried)
        (total, count, _, _), _ = jax.lax.scan(body, init, stacked)
        return total, count

    def run(gradient, p):
        grads, count = gradient(p.stacked, p.leaves, p.leaves, p.w)
        return [*jax.tree.leaves(grads), count]

    def want():
        first = len(e.eager) - len(e.points.leaves)
        cts = [row[first:] for row in e.rows(range(len(e.points.leaves)))]
        each = [np.stack(column) for column in zip(*cts, strict=True)]
        total = [x * np.asarray(n, _real(x.dtype)) for x in cts[0]]
        return [*each, *total, *total, np.asarray(n)]

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    yield _Trial("scan", ft.partial(run, gradient), want)
    inner = jax.grad(jax.jit(loss), argnums=(0, 1, 2), has_aux=True)
    yield _Trial("grad of jit of scan", ft.partial(run, inner), want)


def _real(dtype):
    return jnp.finfo(dtype).dtype
