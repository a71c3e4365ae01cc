"""The checks `adjoint`, `linear`, `zeros` and `order`: rows of a place, what the rule gives,
and what it should give, all of them functions of the same arrays, compiled as one program."""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

# Public, if little known: the pass with which JAX itself drops dead equations.
from jax.interpreters.partial_eval import dce_jaxpr

from .._jaxprs.structure import equations
from ._case import are_finite, Case
from ._compare import as_double, as_real, difference, norm, pairing
from ._differences import directional
from ._oracle import At
from ._outcome import outcome
from ._random_tangents import only
from ._references import as_reference, jvp, vjp, with_self
from ._report import broke, compare, FAILED, failed, Finding, passed, skipped


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


# ---------------------------------------------------------------- order


_FIRST = "right to first order, {} at the next; to check the first order only, as of a "
_FIRST += "straight-through rule, pass `order=1`"
_ONLY_HERE = (
    "the first derivative is right at these arguments, and wrong at others nearby, as if a "
    "factor is missing that is 1 here, or a term that is 0 here: check the rule at other "
    "arguments too"
)
_BY_FORMULA = (
    "right to first order, wrong at the next, but not for a loss that is linear in the output: "
    "the rule returns its value by a formula instead of calling the function, and so the value "
    "has no rule at the next order; return `f(*primals)` as the value"
)
_OF_SOLVERS = 1e-3  # the error of differences of a gradient that is admitted for a solver
_NEARBY = 0.125  # how far away the first derivative is looked at once more


def order(case: Case) -> Iterator[Finding]:
    """Derivatives of order 2 and more, of a scalar loss of the outputs."""
    options = case.options
    explicit = options.expected_tangent or options.expected_cotangent
    if options.expected_cotangent and options.nonlinear:
        yield skipped("order", "no reference for a non-linear `expected_cotangent`")
    elif options.reference is None and (explicit or options.nonlinear):
        yield skipped("order", "no reference: give `reference=` for higher derivatives")
    elif not case.outputs:
        yield skipped("order", "no output has a derivative")
    elif not case.has_reverse:
        yield skipped("order", NO_REVERSE)
    else:
        for n in range(2, options.order + 1):
            yield from _one_order(case, n)


def _one_order(case: Case, n: int) -> Iterator[Finding]:
    side, at = case.wide, At(case.wide.subject.leaves, case.tangents[0], case.cotangents[0])
    reference = side.plain
    if case.options.reference is not None:
        reference = as_reference(side.subject, with_self(side.subject, case.options.reference))
    loss = _scaled_loss(case)
    kinds = {k: d for k, d in _KINDS.items() if case.has_forward or k != "reverse over forward"}
    rows: dict[str, Callable[[At], Any]] = {
        f"order {n}, {kind}": ft.partial(derive, side.f, loss, n)
        for kind, derive in kinds.items()
    }
    expected = {f"expected {n}": ft.partial(_forward_over_reverse, reference, loss, n)}
    found = side.compute(rows | expected, at)
    want = found.pop(f"expected {n}")
    is_known = not isinstance(want, Exception) and are_finite(want)
    name = "autodiff of `reference`" if case.options.reference else "autodiff without the rule"
    tolerance = case.admitted(side, order=n)
    for where, got in found.items():
        if isinstance(got, Exception):
            if not (isinstance(got, TypeError) and "forward-mode" in str(got)):
                yield broke("order", where, got, _FIRST.format("fails"))
            continue  # a `jax.custom_vjp` has no forward mode
        finding = None
        if is_known:
            finding = compare("order", where, want, got, case.names, tolerance, reference=name,
                              cause="")  # fmt: skip
        if finding is None or finding.verdict == FAILED:
            finding = _by_differences(case, where, n, finding)
        yield finding or skipped("order", f"no reference for {where}")
        if finding is not None and finding.verdict == FAILED:
            return


def _by_differences(case: Case, where: str, n: int, finding: Finding | None) -> Finding | None:
    """The check of the first derivative has its own reference, so differences of the rule's
    gradient are a reference for the second, unless `reference` was given: the gradient of a
    rule that is wrong on purpose need not be that of any function."""
    side, w = case.wide, case.cotangents[0]
    is_right = _is_right_to_first_order(case)
    is_refuted = finding is not None and case.options.reference is None and not is_right
    steps = _differences_of_gradient(case, where) if n == 2 else None
    if steps is not None:
        want, got, error, is_exact = steps
        tolerance = case.admitted(side, order=n)
        tolerance = max(tolerance, _OF_SOLVERS) if is_refuted or not is_exact else tolerance
        scale = [10 * e / tolerance for e in error]
        other = compare("order", where, want, got, case.names, tolerance, scale=scale, cause="",
                        reference="differences of the gradient")  # fmt: skip
        if finding is None or is_refuted:
            return other if finding is None or other.verdict != FAILED else finding
        if other.verdict != FAILED and not _is_wrong_nearby(case, w):
            return other
    elif is_refuted:
        why = "autodiff without the rule is another one to first order"
        return skipped("order", f"no reference for {where}: {why}")
    if finding is None:
        return None
    if not is_right:
        return finding
    if _is_wrong_nearby(case, w):
        return dataclasses.replace(finding, cause=_ONLY_HERE)
    by_formula = _is_right_for_linear_loss(case, n)
    return dataclasses.replace(
        finding, cause=_BY_FORMULA if by_formula else _FIRST.format("wrong")
    )


def _differences_of_gradient(case: Case, where: str):
    """Differences of the rule's gradient, the second derivative by the rule, the error, and
    whether the values are those of float64. `None` where they are no reference."""
    side, scaled, w = case.wide, case.scaled, case.cotangents[0]
    leaves = [as_double(x) for x in side.subject.leaves]
    loss = _scaled_loss(case)
    gradient = lambda at: _gradient(loss(side.f, at.w), at.x)
    values = lambda *xs: side.one("gradient", gradient, At(xs, case.tangents[0], w))
    steps = outcome(directional, values, leaves, scaled, side.rounded_to)
    if isinstance(steps, Exception) or not steps.is_trusted:
        return None
    row = ft.partial(_KINDS[where.partition(", ")[2]], side.f, loss, 2)
    got = outcome(side.one, where, row, At(side.subject.leaves, scaled, w))
    is_ok = not isinstance(got, Exception)
    return (steps.tangents_out, got, steps.errors, not steps.is_rounded) if is_ok else None


def _is_wrong_nearby(case: Case, w) -> bool:
    """Whether the first derivative of the rule is wrong at a point nearby. Where the arguments
    are zero, equal or symmetric, a wrong rule may be right to first order, and differences of
    its gradient agree with its wrong second derivative."""
    side, scaled = case.wide, case.scaled
    leaves = [as_double(x) for x in side.subject.leaves]
    moved = [x + _NEARBY * t for x, t in zip(leaves, scaled, strict=True)]
    got = outcome(case.derivative, side, "vjp", w, moved)
    if isinstance(got, Exception):
        return False
    if case.options.reference is not None:
        want = outcome(case.derivative, side, "vjp 0", w, moved)
        names, have, error = case.names, got, 0.0
    else:
        steps = outcome(case.along, scaled, moved)
        if isinstance(steps, Exception) or not steps.is_trusted:
            return False
        want, have = (
            [np.asarray(pairing(steps.tangents_out, w))],
            [np.asarray(pairing(got, scaled))],
        )
        error = float(np.dot(steps.errors, [norm(as_real(x)) for x in w]))
        names = ["all leaves"]
    if isinstance(want, Exception) or not are_finite(want):
        return False
    scale = 10 * error / case.admitted(side)
    return difference(want, have, names, scale=scale).error > 10 * case.admitted(side)


def _is_right_for_linear_loss(case: Case, n: int) -> bool:
    side, at = case.wide, At(case.wide.subject.leaves, case.tangents[0], case.cotangents[0])
    derive = lambda fn: ft.partial(_forward_over_reverse, fn, _linear_loss, n)
    rows: Mapping[str, Any] = {
        f"linear expected {n}": derive(side.plain),
        f"linear {n}": derive(side.f),
    }
    want, got = side.compute(rows, at).values()
    if isinstance(want, Exception) or isinstance(got, Exception):
        return False
    return difference(want, got, case.names).error <= case.admitted(side, order=n)


def _is_right_to_first_order(case: Case) -> bool:
    """Whether the modes that are offered agree with autodiff of the reference."""
    pairs = [("vjp", case.cotangents[0], case.names)]
    pairs += [("jvp", case.tangents[0], case.output_names)] if case.has_forward else []
    for row, direction, names in pairs:
        runs = [
            lambda r=r, d=direction: case.derivative(case.wide, r, d) for r in (row, f"{row} 0")
        ]
        got, want = map(outcome, runs)
        if isinstance(got, Exception) or isinstance(want, Exception):
            return False
        if not difference(want, got, names).error <= case.admitted(case.wide):
            return False
    return True


def _loss(fn, cotangents, scales: Sequence[float] = ()):
    """The quadratic `sum(r + r**2 / 2s)` with `r` the outputs weighted with the cotangents, so
    that the cotangents of the outputs depend on the leaves as well."""

    def loss(*xs):
        total = 0.0
        scale = scales or [1.0] * len(cotangents)
        for out, w, s in zip(fn(*xs), cotangents, scale, strict=True):
            r = (out * w).real
            total = total + (r + r * r / (2 * s)).sum()
        return total

    return loss


def _scaled_loss(case: Case):
    """The same, with weights that make both terms about as large."""
    products = zip(case.wide.value(), case.cotangents[0], strict=True)
    scales = [float(1 + np.max(np.abs(x * w), initial=0)) for x, w in products]
    return lambda fn, cotangents: _loss(fn, cotangents, scales)


def _linear_loss(fn, cotangents):
    pairs = lambda xs: zip(fn(*xs), cotangents, strict=True)
    return lambda *xs: sum((x * w).real.sum() for x, w in pairs(xs))


def _gradient(fn, xs):
    """With respect to every leaf, complex ones as JAX has it."""
    return list(jax.grad(fn, argnums=tuple(range(len(xs))))(*xs))


def _along(fn, t):
    return lambda *ys: jvp(fn, ys, t)


def _forward_over_reverse(fn, loss, n, at: At):
    scalar = loss(fn, at.w)
    gradient = lambda *ys: _gradient(scalar, ys)
    for _ in range(n - 1):
        gradient = _along(gradient, at.t)
    return gradient(*at.x)


def _reverse_over_reverse(fn, loss, n, at: At):
    def slope_of(scalar):
        def slope(*ys):
            terms = zip(_gradient(scalar, ys), at.t, strict=True)
            return sum((g * t).real.sum() for g, t in terms)

        return slope

    scalar = loss(fn, at.w)
    for _ in range(n - 1):
        scalar = slope_of(scalar)
    return _gradient(scalar, at.x)


def _reverse_over_forward(fn, loss, n, at: At):
    scalar = loss(fn, at.w)
    for _ in range(n - 1):
        scalar = _along(scalar, at.t)
    return _gradient(scalar, at.x)


_KINDS = {
    "forward over reverse": _forward_over_reverse,
    "reverse over reverse": _reverse_over_reverse,
    "reverse over forward": _reverse_over_forward,
}
