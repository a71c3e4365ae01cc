"""The checks `adjoint`, `linear` and `zeros`: rows of a place, what the rule gives, and what it
should give, all of them functions of the same arrays, compiled as one program."""

import functools as ft
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

# Public, if little known: the pass with which JAX itself drops dead equations.
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxprs.structure import equations
from ._case import Case
from ._compare import as_double, as_real, difference, norm, pairing
from ._oracle import At
from ._outcome import outcome
from ._random_tangents import only
from ._references import jvp, vjp
from ._report import compare, FAILED, failed, Finding, passed, skipped


NO_REVERSE = "there is no reverse mode"
_PAIRS = 2  # of a tangent and a cotangent, of four that are drawn
_ALL_SUBSETS, _SAMPLED = 4, 8


# ---------------------------------------------------------------- adjoint, linear


def adjoint(case: Case) -> Iterator[Finding]:
    """`<J v, w> = <v, J' w>`, an identity of the two modes that needs no reference."""
    if case.options.nonlinear:
        yield skipped("adjoint", "the backward rule is declared non-linear")
        return
    if not (case.has_forward and case.has_reverse and case.outputs):
        yield skipped("adjoint", "only one mode is offered")
        return
    # Those that cancel least: the rounding error of a small sum is a large part of it.
    pairs = [_products(case, v, w) for v, w in zip(case.tangents, case.cotangents, strict=True)]
    reference = "<J v, w> of forward mode; both are divided by the size of their terms"
    for want, have in sorted(pairs, key=lambda pair: -abs(pair[0]))[:_PAIRS]:
        finding = compare(
            "adjoint", "<J v, w> = <v, J' w>", [np.array(want)], [np.array(have)],
            ["the product"], 10 * case.admitted(case.wide), reference=reference,
            cause="forward and reverse mode are not the same linear map",
        )  # fmt: skip
        if finding.verdict == FAILED and _is_meant(case):
            text = "the other mode is the derivative of the function, and not of the formula"
            finding = skipped("adjoint", text)
        yield finding
        if finding.verdict != "passed":
            return


def _products(case: Case, v, w) -> tuple[float, float]:
    """`<J v, w>` and `<v, J' w>`, divided by the size of their terms."""
    pushed = case.derivative(case.wide, "jvp", v)
    pulled = case.derivative(case.wide, "vjp", w)
    ahead, back = pairing(pushed, w), pairing(v, pulled)
    terms = lambda xs, ys: norm(np.array([
        norm(as_real(as_double(x) * as_double(y))) for x, y in zip(xs, ys, strict=True)
    ]))  # fmt: skip
    size = max(terms(pushed, w), terms(v, pulled), abs(ahead), abs(back))
    # One of them is zero, and the other a rounding error, as where `x - jnp.mean(x)` is zero.
    sizes = [norm(np.array([norm(as_real(x)) for x in xs])) for xs in (v, w)]
    is_zero = min(abs(ahead), abs(back)) == 0
    if size == 0 or (is_zero and size <= case.admitted(case.wide) * 1e-8 * math.prod(sizes)):
        return 0.0, 0.0
    return ahead / size, back / size


def _is_meant(case: Case) -> bool:
    """Whether one mode was given by a formula, and the other one is that of the function."""
    options = case.options
    if (options.expected_tangent is None) == (options.expected_cotangent is None):
        return False
    is_pulled = options.expected_tangent is not None
    row, direction = ("vjp", case.cotangents[0]) if is_pulled else ("jvp", case.tangents[0])
    want = outcome(case.derivative, case.wide, f"{row} plain", direction)
    got = case.derivative(case.wide, row, direction)
    names = case.names if is_pulled else case.output_names
    is_error = isinstance(want, Exception)
    return not is_error and difference(want, got, names).error <= case.admitted(case.wide)


def linear(case: Case) -> Iterator[Finding]:
    """Additivity and homogeneity, in the tangent and in the cotangent."""
    if case.has_forward and case.outputs:
        yield from _linear(case, "tangent", "jvp", case.tangents, case.output_names)
    if case.options.nonlinear or not case.has_reverse:
        if not case.has_forward:
            yield skipped("linear", "the backward rule is declared non-linear")
    elif case.outputs:
        yield from _linear(case, "cotangent", "vjp", case.cotangents, case.names)


def _linear(case: Case, what: str, row: str, drawn, names) -> Iterator[Finding]:
    a, b = drawn[:2]
    apply = ft.partial(case.derivative, case.wide, row)
    combined = lambda k, m: [(k * x + m * y).astype(x.dtype) for x, y in zip(a, b, strict=True)]
    of_a, of_b = apply(a), apply(b)
    size = max(norm(np.array([norm(as_real(x)) for x in of_a])), 1e-30)
    not_linear = (
        "the rule is not linear: it clips, takes the sign, or squares"
        " (if that is meant, say `nonlinear=True`)"
    )
    affine = "affine: something is added that no tangent or cotangent multiplies"
    big, small = 2.0**12, -(2.0**-12)
    trials = [
        ("of zero", affine, 0, 0, 1 / size),
        (f"of {big:g} times it", not_linear, big, 0, 1),
        (f"of {small:g} times it", not_linear, small, 0, 1),
        ("of a sum", "the rule is not linear: of a sum it is not the sum", 2, -3, 1),
    ]
    for where, cause, k, m, factor in trials:
        got = [x * factor for x in apply(combined(k, m))]
        want = [(k * x + m * y) * factor for x, y in zip(of_a, of_b, strict=True)]
        # The terms may cancel.
        scale = [
            factor * norm(as_real(k * x)) + factor * norm(as_real(m * y))
            for x, y in zip(of_a, of_b, strict=True)
        ]
        tolerance = case.admitted(case.wide)
        tolerance = max(tolerance, case.own.tolerance) if where == "of a sum" else tolerance
        place = f"in the {what}: {where}"
        scale = scale if where == "of a sum" else 0.0
        finding = compare(
            "linear", place, want, got, names, tolerance, cause=cause, scale=scale
        )
        yield finding
        if finding.verdict == FAILED:
            return  # the others would fail for the same reason


# ---------------------------------------------------------------- zeros


def zeros(case: Case) -> Iterator[Finding]:
    """The dense derivative for every subset, and no equations for unperturbed leaves."""
    n_leaves, n_outputs = len(case.names), len(case.outputs)
    if n_leaves < 2 and n_outputs < 2:
        yield skipped("zeros", "one leaf and one output: there are no subsets")
        return
    side, t, w = case.wide, case.tangents[0], case.cotangents[0]
    rng = case.draw("zeros")
    rows: dict[str, Callable[[At], Any]] = {}
    wanted: dict[str, tuple[str, list[Any], Sequence[str]]] = {}
    dense = case.derivative(side, "vjp", w) if case.has_reverse and case.outputs else []
    for kept in _subsets(n_leaves, rng):
        name, mine = _label(kept, case.names), [case.names[i] for i in kept]
        cause = f"wrong where {name} is perturbed, right where all leaves are"
        if case.has_forward and case.outputs:
            place = f"{name} perturbed, forward"
            rows[place] = ft.partial(_pushed_alone, side.f, kept)
            want = case.derivative(side, "jvp", only(t, kept))
            wanted[place] = cause, want, case.output_names
        if dense:
            place = f"{name} perturbed, reverse"
            rows[place] = ft.partial(_pulled_alone, side.f, kept)
            wanted[place] = cause, [dense[i] for i in kept], mine
    for kept in _subsets(n_outputs, rng) if dense else ():
        name = _label(kept, case.output_names)
        rows[f"{name} used"] = ft.partial(_of_used, side.f, kept)
        cause = f"wrong where {name} is used, right where all outputs are"
        want = case.derivative(side, "vjp", only(w, kept))
        wanted[f"{name} used"] = cause, want, case.names
    results = side.compute(rows, At(side.subject.leaves, t, w))
    for place, (cause, want, names) in wanted.items():
        tolerance = case.admitted(side)
        yield compare("zeros", place, want, results[place], names, tolerance, cause=cause)
    if case.has_forward and n_leaves > 1:
        yield from _dead_work(case)


def _subsets(n: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """The non-empty proper subsets: all of them, or a sample with all singles."""
    if n <= _ALL_SUBSETS:
        return [s for k in range(1, n) for s in itertools.combinations(range(n), k)]
    singles = [(i,) for i in range(min(n, _SAMPLED))]
    rest = [tuple(j for j in range(n) if j != i) for (i,) in singles[:2]]
    draws = [np.flatnonzero(rng.random(n) < 0.5) for _ in range(2)]
    return [*singles, *rest, *(tuple(map(int, d)) for d in draws if 0 < len(d) < n)]


def _label(kept: Sequence[int], names: Sequence[str]) -> str:
    return f"only {', '.join(names[i] for i in kept[:3])}{', ...' if kept[3:] else ''}"


def _restricted(fn, leaves: Sequence[Any], kept: Sequence[int]):
    """The function of the leaves in `kept`; the others are constant."""
    at = lambda i, xs: xs[kept.index(i)] if i in kept else leaves[i]
    return lambda *xs: fn(*(at(i, xs) for i in range(len(leaves))))


def _pushed_alone(fn, kept, at: At):
    return jvp(_restricted(fn, at.x, kept), [at.x[i] for i in kept], [at.t[i] for i in kept])


def _pulled_alone(fn, kept, at: At):
    return vjp(_restricted(fn, at.x, kept), [at.x[i] for i in kept], at.w)


def _of_used(fn, kept, at: At):
    return vjp(lambda *xs: [fn(*xs)[i] for i in kept], at.x, [at.w[i] for i in kept])


def _dead_work(case: Case) -> Iterator[Finding]:
    """With one leaf perturbed, no equation may be left that only the other tangents need.

    The number of equations to compare with: the dense tangent is linear, so its derivative
    along the tangent of one leaf is the same tangent, without the terms of the other leaves.
    """
    if not _knows_zeros(case):
        return
    for i, name in enumerate(case.names[:_SAMPLED]):
        counts = outcome(_work, case, case.own.f, i)
        if isinstance(counts, Exception):  # there is no second derivative to compare with
            return
        actual, needed = counts
        if actual > needed:
            # JAX's own rules (`jax.nn.softplus`) compute dead terms as well.
            plain = outcome(_work, case, case.own.plain, i)
            needed += 0 if isinstance(plain, Exception) else max(plain[0] - plain[1], 0)
        where = f"only {name} perturbed"
        if actual <= needed:
            yield passed("zeros", where)
            continue
        text = f"the jaxpr has {actual} equations, and needs {needed}: some belong to leaves "
        cause = "a zero tangent (`None`) was made into an array of zeros"
        yield failed("zeros", where, f"{text}that are not perturbed.", cause)


def _knows_zeros(case: Case) -> bool:
    """Whether a rule is given `None`, or symbolic zeros, and so can take them for arrays: its
    own, or one that it calls. A rule of `eqg` that is given arrays has none for what is not
    perturbed, and `jax.custom_jvp` makes them itself."""
    fn = case.subject.fn
    if isinstance(fn, jax.custom_jvp):
        return bool(fn.symbolic_zeros)
    rule = getattr(getattr(fn, "_rules", None), "jvp_rule", None)
    # The rule of a solver is ours.
    return rule.symbolic_zeros if rule is not None else not case.is_solver


def _work(case: Case, fn, i: int) -> tuple[int, int]:
    """The number of equations with one leaf perturbed, and the number that is needed."""
    leaves, t = list(case.subject.leaves), case.tangents[0][i]
    one = lambda xs, t: jvp(_restricted(fn, xs, [i]), [xs[i]], [t])
    dense = lambda xs, t: jvp(fn, xs, [
        t if j == i else jnp.zeros_like(x) for j, x in enumerate(xs)
    ])  # fmt: skip
    needed = lambda xs, t: jvp(lambda t: dense(xs, t), [jnp.zeros_like(t)], [t])
    return _count(one, leaves, t), _count(needed, leaves, t)


def _count(run, *args) -> int:
    """The number of equations after dead ones are dropped. The cast of a scalar does not count:
    whether the `0` in `jnp.where(x > 0, t, 0)` is cast depends on how `t` came about."""
    closed = jax.make_jaxpr(run)(*args)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    alive = ClosedJaxpr(jaxpr, closed.consts)
    is_cast = lambda e: (
        e.primitive.name == "convert_element_type" and e.outvars[0].aval.size == 1
    )
    is_call = lambda e: any(hasattr(p, "eqns") for p in e.params.values())
    return sum(not is_cast(e) and not is_call(e) for e in equations(alive))
