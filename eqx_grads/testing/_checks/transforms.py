"""The check `transforms`: the same results under every transformation as in eager calls.

Eager calls compute value, tangent and cotangents of three examples, and every transformation
has to return the same. The rule is compared with itself, so no other reference is needed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._case import Case
from .._findings import broke, compare
from .._report import Finding


_EXAMPLES = (1.0, 0.97, 0.94)  # what the leaves are multiplied with
_ALL_SUBSETS = 3  # of the arguments, for `vmap`


class _Expected:
    """The results of eager calls, each a list of arrays: outputs, tangents, cotangents."""

    def __init__(self, case: Case):
        self.fn = lambda *xs: case.subject.arrays(*xs)
        self.leaves = case.subject.leaves
        self.examples = [[_scaled(x, s) for x in self.leaves] for s in _EXAMPLES]
        outputs = self.fn(*self.leaves)
        self.w = [jnp.asarray(w) for w in case.cotangents()]
        self.t = [jnp.asarray(t) for t in case.tangents()]
        self.forward, self.reverse = case.offers_forward, case.offers_reverse
        self.n_outputs = len(outputs)
        self.eager = [self.derive(self.fn, xs) for xs in self.examples]
        names = [f"{kind} of {name}" for kind in ("value",) for name in case.output_names]
        names += [f"tangent of {n}" for n in case.output_names] if self.forward else []
        names += [f"cotangent of {name}" for name in case.names] if self.reverse else []
        self.names = names

    def derive(self, fn: Callable[..., Any], leaves: Sequence[Any]) -> list[Any]:
        """Value, tangent and cotangents by plain `jax.jvp` and `jax.vjp`."""
        out, tangents, cotangents = fn(*leaves), [], []
        if self.forward:
            out, tangents = jax.jvp(fn, list(leaves), self.t)
        if self.reverse:
            out, pull = jax.vjp(fn, *leaves)
            cotangents = pull(self.w)
        return [*out, *tangents, *cotangents]

    def derive_at(self, *leaves: Any) -> list[Any]:
        return self.derive(self.fn, leaves)

    def per_example(self, kept: Sequence[int]) -> list[Any]:
        """The expected result of `vmap(derive)` with the leaves in `kept` batched."""
        rows = self._mixed(kept)
        return [np.stack([np.asarray(x) for x in column]) for column in zip(*rows, strict=True)]

    def of_batch(self, kept: Sequence[int]) -> list[Any]:
        """The expected result of `derive(vmap)`: cotangents of unbatched leaves are summed."""
        columns = self.per_example(kept)
        first = len(columns) - len(self.leaves)
        for i in range(len(self.leaves) if self.reverse else 0):
            if i not in kept:
                columns[first + i] = columns[first + i].sum(0, dtype=columns[first + i].dtype)
        return columns

    def _mixed(self, kept):
        return [
            self.derive(self.fn, [x if i in kept else y for i, (x, y) in enumerate(pairs)])
            for pairs in [list(zip(xs, self.leaves, strict=True)) for xs in self.examples]
        ]


def _scaled(x, factor):
    return jnp.asarray(np.asarray(x) * factor).astype(x.dtype)


class _Trial:
    """A transformation: `run()` should return `want()`."""

    def __init__(self, name: str, run: Callable[[], Any], want: Callable[[], Any]):
        self.name = name
        self.run = run
        self.want = want


def transforms(case: Case) -> Iterator[Finding]:
    """Compare every transformation with eager calls."""
    if not case.own.outputs or not case.subject.leaves:
        return
    expected = _Expected(case)
    trials = [*_program_trials(case, expected), *_vmap_trials(case, expected)]
    trials += [*_scan_trials(expected)] if expected.reverse else []
    results = _run_all(trials)
    tolerance = case.tolerance(case.own) + 10 * case.noise
    for trial, got in zip(trials, results, strict=True):
        cause = f"right eagerly, wrong under {trial.name}"
        if isinstance(got, Exception):
            yield broke("transforms", trial.name, got, f"fails under {trial.name} only")
            continue
        want = trial.want()
        names = expected.names
        if len(want) != len(names):
            names = [f"result {i}" for i in range(len(want))]
        yield compare("transforms", trial.name, want, got, names, tolerance, cause=cause)


# Run outside the common `jit`, inside which they would test nothing.
_ALONE = ("jit around the function", "filter_jit", "sharding over two devices")


def _attempt(trial: _Trial):
    try:
        return trial.run()
    except Exception as e:
        return e


def _run_all(trials: Sequence[_Trial]) -> list[Any]:
    """Compile the trials as one program, which is much faster than one by one."""
    together = [trial for trial in trials if trial.name not in _ALONE]
    try:
        done = iter(jax.jit(lambda: [list(trial.run()) for trial in together])())
    except Exception:  # one by one, to find the trial that fails
        jitted = [_Trial(t.name, jax.jit(lambda t=t: list(t.run())), t.want) for t in together]
        done = iter([_attempt(trial) for trial in jitted])
    return [_attempt(t) if t.name in _ALONE else next(done) for t in trials]


def _program_trials(case: Case, e: _Expected) -> Iterator[_Trial]:
    xs, want = e.leaves, lambda: e.eager[0]
    checkpoint = jax.checkpoint(e.fn)
    nothing = jax.checkpoint(e.fn, policy=jax.checkpoint_policies.nothing_saveable)
    yield _Trial("jit of the derivative", lambda: e.derive(e.fn, xs), want)
    yield _Trial("jit around the function", lambda: e.derive(jax.jit(e.fn), xs), want)
    yield _Trial("filter_jit", lambda: e.derive(_filter_jitted(case), xs), want)
    yield _Trial("jax.checkpoint", lambda: e.derive(checkpoint, xs), want)
    yield _Trial("jax.checkpoint with a policy", lambda: e.derive(nothing, xs), want)
    yield _Trial("cond", lambda: e.derive(_in_cond(e.fn), xs), want)
    if len(jax.devices()) > 1:
        everything = list(range(len(xs)))
        yield _Trial(
            "sharding over two devices", lambda: _sharded(e), lambda: _two(e, everything)
        )


def _filter_jitted(case: Case):
    # Modules are arguments of the jitted function, with their static leaves.
    call = eqx.filter_jit(lambda fn, args: fn(*args, **case.subject.kwargs))

    def fn(*leaves):
        module, args = case.subject.tree(leaves)
        return [x for x in jax.tree.leaves(call(module, args)) if _is_inexact(x)]

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


def _sharded(e: _Expected):
    mesh = Mesh(np.array(jax.devices()[:2]), ("batch",))
    spread = NamedSharding(mesh, PartitionSpec("batch"))
    batch = [
        jax.device_put(jnp.stack([a, b]), spread) for a, b in zip(*e.examples[:2], strict=True)
    ]
    return jax.jit(jax.vmap(e.derive_at))(*batch)


def _two(e: _Expected, kept):
    return [column[:2] for column in e.per_example(kept)]


# ---------------------------------------------------------------- vmap


def _vmap_trials(case: Case, e: _Expected) -> Iterator[_Trial]:
    """Over each subset of the arguments, inside and outside of the derivative."""
    groups = list(dict.fromkeys(case.subject.groups))
    for chosen in _subsets(groups):
        kept = [i for i, group in enumerate(case.subject.groups) if group in chosen]
        label = ", ".join(case.names[i] for i in kept[:3]) + (", ..." if kept[3:] else "")
        axes = [0 if i in kept else None for i in range(len(e.leaves))]
        batch = [
            jnp.stack([xs[i] for xs in e.examples]) if i in kept else x
            for i, x in enumerate(e.leaves)
        ]
        yield _Trial(
            f"vmap, over {label}",
            lambda axes=axes, batch=batch: jax.vmap(e.fn, in_axes=axes)(*batch),
            lambda kept=kept: e.per_example(kept)[: e.n_outputs],
        )
        yield _Trial(
            f"vmap of the derivative, over {label}",
            lambda axes=axes, batch=batch: jax.vmap(e.derive_at, in_axes=axes)(*batch),
            lambda kept=kept: e.per_example(kept),
        )
        yield _Trial(
            f"derivative of vmap, over {label}",
            lambda axes=axes, batch=batch: _derive_batch(e, axes, batch),
            lambda kept=kept: e.of_batch(kept),
        )


def _subsets(groups) -> list[tuple[int, ...]]:
    if len(groups) <= _ALL_SUBSETS:
        sizes = range(1, len(groups) + 1)
        return [s for size in sizes for s in itertools.combinations(groups, size)]
    return [*((g,) for g in groups[:6]), tuple(groups)]


def _derive_batch(e: _Expected, axes, batch):
    n = len(_EXAMPLES)
    batched = jax.vmap(e.fn, in_axes=axes)
    spread = lambda x: jnp.broadcast_to(x, (n, *x.shape))
    t = [spread(x) if axis == 0 else x for x, axis in zip(e.t, axes, strict=True)]
    out, tangents, cotangents = batched(*batch), [], []
    if e.forward:
        out, tangents = jax.jvp(batched, batch, t)
    if e.reverse:
        out, pull = jax.vjp(batched, *batch)
        cotangents = pull([spread(w) for w in e.w])
    return [*out, *tangents, *cotangents]


# ---------------------------------------------------------------- scan


def _scan_trials(e: _Expected) -> Iterator[_Trial]:
    """Leaves that are scanned over, closed over, and carried, beside a counter and a key."""
    n = len(_EXAMPLES)
    stacked = [jnp.stack(column) for column in zip(*e.examples, strict=True)]

    def pair(xs):
        terms = [jnp.real(jnp.sum(out * w)) for out, w in zip(e.fn(*xs), e.w, strict=True)]
        return sum(terms[1:], terms[0]).astype(_real(e.w[0].dtype))

    def loss(stacked, closed, carried):
        def body(carry, xs):
            total, count, key, leaves = carry
            key, _ = jr.split(key)
            total = total + pair(xs) + pair(closed) + pair(leaves)
            return (total, count + 1, key, leaves), None

        zero = jnp.zeros((), _real(e.w[0].dtype))
        init = (zero, jnp.zeros((), "int32"), jr.key(0), carried)
        (total, count, _, _), _ = jax.lax.scan(body, init, stacked)
        return total, count

    def run(gradient):
        grads, count = gradient(stacked, e.leaves, e.leaves)
        return [*jax.tree.leaves(grads), count]

    def want():
        first = len(e.eager[0]) - len(e.leaves)
        cts = [row[first:] for row in e.eager]
        each = [np.stack([np.asarray(x) for x in column]) for column in zip(*cts, strict=True)]
        total = [np.asarray(x) * np.asarray(n, _real(x.dtype)) for x in cts[0]]
        return [*each, *total, *total, np.asarray(n)]

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    yield _Trial("scan", lambda: run(gradient), want)
    inner = jax.grad(jax.jit(loss), argnums=(0, 1, 2), has_aux=True)
    yield _Trial("grad of jit of scan", lambda: run(inner), want)


def _real(dtype):
    return jnp.finfo(dtype).dtype
