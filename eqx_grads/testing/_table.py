"""The checks `adjoint`, `linear`, `zeros` and `order`: rows of a place, what the rule gives,
and what it should give, all of them functions of the same arrays, compiled as one program.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs.dependence import without_unused
from .._jaxprs.operands import at as pick, fill, restricted
from .._jaxprs.structure import equations, inner_programs
from ._case import Case
from ._compare import are_finite, as_double, norm, pairing, relative_error, size_of_all
from ._derivatives import judge
from ._differences import directional
from ._oracle import At, jvp, Row, vjp
from ._outcome import outcome
from ._random_tangents import only
from ._report import broke, compare, FAILED, failed, Finding, PASSED, skipped


_SAMPLED = 8
_NOT_LINEAR = (
    "the rule is not linear: it clips, takes the sign, or squares"
    " (if that is meant, say `nonlinear=True`)"
)


# ---------------------------------------------------------------- adjoint, linear


def adjoint(case: Case) -> Iterator[Finding]:
    """`<J v, w> = <v, J' w>`, an identity of the two modes that needs no reference."""
    drawn = zip(case.tangents, case.cotangents, strict=True)
    products = zip(*(_products(case, *d) for d in drawn), strict=True)
    ahead, back, sizes = map(np.array, products)
    yield compare(
        "<J v, w> = <v, J' w>", [ahead], [back], ["the product"], 10 * case.admitted(),
        note="expected: <J v, w> of forward mode",
        cause="forward and reverse mode are not the same linear map",
        # Where the terms of a product cancel, the error is relative to their size.
        scale=max(norm(sizes) - norm(ahead), 0.0),
    )  # fmt: skip


def _products(case: Case, v, w) -> tuple[float, float, float]:
    """`<J v, w>` and `<v, J' w>`, and the size of their terms."""
    pushed, pulled = case.derivative("jvp", v), case.derivative("vjp", w)
    pairs = zip((*pushed, *v), (*w, *pulled), strict=True)
    size = size_of_all([as_double(x) * as_double(y) for x, y in pairs])
    # Both may be zero but for rounding errors, as where `x - jnp.mean(x)` is zero.
    zero = case.admitted() * 1e-8 * math.prod(map(size_of_all, (v, w)))
    return pairing(pushed, w), pairing(v, pulled), size + zero


def linear(case: Case) -> Iterator[Finding]:
    """Additivity and homogeneity, in the tangent and in the cotangent."""
    if case.has_forward:
        yield from _linear(case, "tangent", "jvp", case.tangents, case.output_names)
    if case.has_reverse and not case.options.nonlinear:
        yield from _linear(case, "cotangent", "vjp", case.cotangents, case.names)
    elif not case.has_forward:
        yield skipped("the backward rule is declared non-linear")


def _linear(case: Case, what: str, row: str, drawn, names) -> Iterator[Finding]:
    a, b = drawn[:2]
    of_a, of_b = (case.derivative(row, d) for d in (a, b))
    affine = "affine: something is added that no tangent or cotangent multiplies"
    for where, cause, k, m in (
        ("of zero", affine, 0, 0),
        *((f"of {k:g} times it", _NOT_LINEAR, k, 0) for k in (2.0**12, -(2.0**-12))),
        ("of a sum", "the rule is not linear: of a sum it is not the sum", 2, -3),
    ):
        mixed = [k * x + m * y for x, y in zip(a, b, strict=True)]
        with np.errstate(invalid="ignore"):  # a derivative may be infinite
            terms = [(k * x, m * y) for x, y in zip(of_a, of_b, strict=True)]
            expected = [x + y for x, y in terms]
        # The terms may cancel; of zero, the error is relative to the derivative of `a`.
        sizes = [size_of_all(pair) for pair in terms] if m else 0.0
        finding = compare(
            f"in the {what}: {where}", expected,
            case.derivative(row, mixed), names,
            max(case.admitted(), case.own.tolerance if m else 0.0),
            cause=cause, scale=sizes if k else size_of_all(of_a),
        )  # fmt: skip
        yield finding
        if finding.verdict == FAILED:
            return  # the others would fail for the same reason


# ---------------------------------------------------------------- zeros


def zeros(case: Case) -> Iterator[Finding]:
    """The dense derivative for every subset, and no equations for unperturbed leaves."""
    f, t, w = case.wide.f, case.at.t, case.at.w
    whole = case.derivative("vjp") if case.has_reverse else []

    def of_part(derive, kept, along):
        return lambda at: derive(restricted(f, at.x, kept), pick(at.x, kept), along(at))

    # The place, the row, what it should give, and names.
    rows: list[tuple[str, Row, Any, Sequence[str]]] = []
    for kept in _subsets(len(case.names)):
        place = f"{_label(kept, case.names)} perturbed"
        if case.has_forward:
            row = of_part(jvp, kept, lambda at, kept=kept: pick(at.t, kept))
            want = case.derivative("jvp", only(t, kept))
            rows.append((f"{place}, forward", row, want, case.output_names))
        if case.has_reverse:
            row = of_part(vjp, kept, lambda at: at.w)
            rows.append((f"{place}, reverse", row, pick(whole, kept), pick(case.names, kept)))
    for kept in _subsets(len(case.outputs)) if case.has_reverse else ():
        row = lambda at, kept=kept: vjp(lambda *xs: pick(f(*xs), kept), at.x, pick(at.w, kept))
        want = case.derivative("vjp", only(w, kept))
        rows.append((f"{_label(kept, case.output_names)} used", row, want, case.names))
    # By number: two subsets of many leaves have the same name.
    found = case.wide.compute(
        {f"part {i}": row for i, (_, row, *_) in enumerate(rows)}, case.at
    )
    cause = "right where all leaves are perturbed, and all outputs are used"
    for (place, _, want, names), got in zip(rows, found.values(), strict=True):
        yield compare(place, want, got, names, case.admitted(), cause=cause)
    if case.has_forward and len(case.names) > 1 and _is_given_none(case.subject.fn):
        yield from _dead_work(case)


def _subsets(n: int) -> list[tuple[int, ...]]:
    """Each one alone, and all without it."""
    indices = range(n if n > 1 else 0)
    singles = [(i,) for i in indices[:_SAMPLED]]
    rest = [tuple(j for j in indices if j != i) for (i,) in singles]
    return list(dict.fromkeys([*singles, *rest]))


def _label(kept: Sequence[int], names: Sequence[str]) -> str:
    return f"only {', '.join(names[i] for i in kept[:3])}{', ...' if kept[3:] else ''}"


def _is_given_none(fn: Any) -> bool:
    """Whether its rule gets `None`, or symbolic zeros, and so can take them for arrays.
    Other rules of `eqg` have no tangents of what is not perturbed, and `jax.custom_jvp` makes
    arrays of zeros itself."""
    if isinstance(fn, jax.custom_jvp):
        return bool(fn.symbolic_zeros)
    rule = getattr(getattr(getattr(fn, "__func__", fn), "_rules", None), "jvp_rule", None)
    return isinstance(fn, eqx.filter_custom_jvp) or bool(getattr(rule, "symbolic_zeros", False))


def _dead_work(case: Case) -> Iterator[Finding]:
    """With one leaf perturbed, no equation may be left that only the other tangents need.

    The number of equations to compare with: the dense tangent is linear, so its derivative
    along the tangent of one leaf is the same tangent, without the terms of the other leaves.
    """
    f, leaves = case.own.f, case.subject.leaves
    zeros = [jnp.zeros_like(x) for x in leaves]

    def counts_of(i):
        alone = lambda xs, t: jvp(restricted(f, xs, [i]), [xs[i]], [t])
        dense = lambda xs, t: jvp(f, xs, fill(zeros, [i], [t]))
        needed = lambda xs, t: jvp(ft.partial(dense, xs), [zeros[i]], [t])
        return [_count(run, leaves, case.at.t[i]) for run in (alone, needed)]

    for i, name in enumerate(case.names[:_SAMPLED]):
        counts = outcome(counts_of, i)
        # If there is no second derivative, there is nothing to compare with.
        if not isinstance(counts, Exception) and counts[0] > counts[1]:
            text = f"the jaxpr has {counts[0]} equations, and needs {counts[1]}: some belong "
            text += "to leaves that are not perturbed."
            cause = "a zero tangent (`None`) was made into an array of zeros"
            yield failed(f"only {name} perturbed", text, cause)


def _count(run, *args) -> int:
    """The number of equations after dead ones are dropped. The cast of a scalar does not count:
    whether the `0` in `jnp.where(x > 0, t, 0)` is cast depends on how `t` came about."""
    alive = without_unused(jax.make_jaxpr(run)(*args))
    is_cast = lambda e: (
        e.primitive.name == "convert_element_type" and e.outvars[0].aval.size == 1
    )
    return sum(not is_cast(e) and not inner_programs(e) for e in equations(alive))


_ONLY_FIRST = "To check the first order only, as of a straight-through rule, pass `order=1`"
_FAILS = f"right to first order, fails at the next. {_ONLY_FIRST}"
_NEXT = "right to first order, wrong at the next:"
_BY_FORMULA = (
    f"{_NEXT} does the rule return `f(*primals)` as the value, or a formula? {_ONLY_FIRST}"
)
_HELD = (
    f"{_NEXT} does the rule hold something constant (`stop_gradient`, NumPy), or call a "
    f"function with a wrong rule? {_ONLY_FIRST}"
)
_NOT_HELD = f"{_NEXT} the function is constant in {{}}. Is its rule constant, too?"
_ONLY_HERE = (
    "the first derivative is right at these arguments, and wrong at others nearby, as if a "
    "factor is missing that is 1 here, or a term that is 0 here"
)
FORWARD_OVER_REVERSE = "forward over reverse"
REVERSE_OVER_REVERSE = "reverse over reverse"
_REVERSE_OVER_FORWARD = "reverse over forward"
_OF_SOLVERS = 1e-3  # the error of differences of a gradient that is admitted for a solver


def order(case: Case) -> Iterator[Finding]:
    """Derivatives of order 2 and more, of a scalar loss of the outputs."""
    if case.options.order < 2:
        return
    side = case.wide
    is_right, is_right_here_only = _first(case)
    at = case.at._replace(w=_weights(case))
    for n in range(2, case.options.order + 1):
        rows: dict[str, Row] = {
            f"order {n}, {kind}": ft.partial(higher, kind, side.f, n)
            for kind in (FORWARD_OVER_REVERSE, REVERSE_OVER_REVERSE, _REVERSE_OVER_FORWARD)
            if case.has_forward or kind != _REVERSE_OVER_FORWARD
        }
        expected = ft.partial(higher, FORWARD_OVER_REVERSE, side.expected, n)
        *found, want = side.compute(rows | {f"expected {n}": expected}, at).values()
        for (where, row), got in zip(rows.items(), found, strict=True):
            if isinstance(got, TypeError) and "forward-mode" in str(got):
                continue  # of a `jax.custom_vjp`
            if isinstance(got, Exception):
                yield broke(where, got, _FAILS)
                return
            finding = skipped(f"no reference for {where}")
            if not isinstance(want, Exception) and are_finite(want):
                finding = compare(where, want, got, case.names, 10 * case.admitted(),
                                  cause="", note=case.reference)  # fmt: skip
            if finding.verdict != PASSED and n == 2:
                is_refuted = case.options.reference is None and not is_right
                is_told = case.options.reference is not None or is_right_here_only
                finding = _by_differences(case, where, row, finding, is_refuted, is_told)
            if finding.verdict == FAILED and is_right:
                cause = _ONLY_HERE if is_right_here_only else _cause(case, got)
                finding = dataclasses.replace(finding, cause=cause)
            yield finding
            if finding.verdict == FAILED:
                return
    if is_right_here_only:
        # The odd functions are an example: `t_x` instead of `cos(x) * t_x`, at zero.
        yield failed("a point nearby", "the first derivative is wrong there", _ONLY_HERE)


def _first(case: Case) -> tuple[bool, bool]:
    """Whether the modes that are offered agree with autodiff; and whether they do so here only.
    Where the arguments are zero, equal or symmetric, a wrong rule may be right to first order,
    and differences of its gradient agree with its wrong second derivative."""
    modes = ["reverse", *["forward"] * case.has_forward]
    agrees = lambda finding, is_expected: is_expected and finding.verdict != FAILED
    is_right = True is outcome(lambda: all(agrees(*judge(case, mode)) for mode in modes))
    point = lambda: [as_double(x) + t / 8 for x, t in zip(case.x, case.scaled, strict=True)]
    nearby = outcome(lambda: judge(case.changed(x=point()), "reverse")[0].verdict)
    return is_right, is_right and nearby == FAILED


def _cause(case: Case, second: Any) -> str:
    """Why a rule with the expected first derivative has another second one."""
    # The value that the rule returns has to have the derivative of the rule.
    of_value = lambda at: vjp(lambda *xs: jax.vjp(case.wide.f, *xs)[0], at.x, at.w)
    want = case.derivative("vjp")
    have = outcome(case.wide.one, "value of the rule", of_value, case.at)
    if isinstance(have, Exception) or relative_error(want, have) > case.admitted():
        return _BY_FORMULA
    if not are_finite(second):
        return ""  # `finite` says why
    constant = [n for n, x in zip(case.names, want, strict=True) if not np.any(x)]
    return _NOT_HELD.format(", ".join(constant)) if constant else _HELD


def _by_differences(
    case: Case, where: str, row: Row, finding: Finding, is_refuted: bool, is_told: bool
) -> Finding:
    """The check of the first derivative has its own reference, so differences of the rule's
    gradient are a reference for the second.

    - `is_refuted`: whether autodiff is none, as it is wrong to first order.
    - `is_told`: whether these differences are none. The gradient of a rule that is wrong on
        purpose, or wrong nearby, need not be the gradient of any function.
    """
    side, w, scaled = case.wide, _weights(case), case.scaled
    leaves = list(map(as_double, side.subject.leaves))
    gradient = lambda at: _grad(_loss(side.f, at.w))(*at.x)
    values = lambda *xs: side.one("gradient", gradient, At(xs, scaled, w))
    slope = outcome(directional, values, leaves, scaled, side.rounded_to)
    got = outcome(side.one, where, row, At(leaves, scaled, w))
    if isinstance(slope, Exception) or isinstance(got, Exception) or slope.why:
        return skipped(f"no reference for {where}") if is_refuted else finding
    is_rough = (finding.verdict == FAILED and is_refuted) or slope.is_rounded
    tolerance = max(10 * case.admitted(), _OF_SOLVERS if is_rough else 0.0)
    other = compare(
        where, slope.tangents_out, got, case.names, tolerance, cause="",
        note="expected: differences of the gradient",
        scale=[10 * e / tolerance for e in slope.errors],
    )  # fmt: skip
    is_right = other.verdict != FAILED and not is_told
    return other if finding.verdict != FAILED or is_right else finding


def _weights(case: Case) -> list[Any]:
    """The cotangents, so that both terms of the loss are about as large."""
    products = zip(case.derivative("f"), case.at.w, strict=True)
    return [w / (1 + np.max(np.abs(x * w), initial=0)) for x, w in products]


def higher(kind: str, fn: Callable[..., Any], n: int, at: At) -> list[Any]:
    """The gradient of the loss, `n - 1` times differentiated along the tangents."""

    def slope(scalar):
        terms = lambda xs: zip(_grad(scalar)(*xs), at.t, strict=True)
        return lambda *xs: sum((g * t).real.sum().astype(float) for g, t in terms(xs))

    along = lambda fn: lambda *xs: jvp(fn, xs, at.t)
    step = slope if kind == REVERSE_OVER_REVERSE else along
    is_inside = kind == FORWARD_OVER_REVERSE  # the gradient
    fn = _grad(_loss(fn, at.w)) if is_inside else _loss(fn, at.w)
    for _ in range(n - 1):
        fn = step(fn)
    return (fn if is_inside else _grad(fn))(*at.x)


def _loss(fn, weights):
    """The quadratic `sum(r + r**2 / 2)` with `r` the outputs times their weights, so that the
    cotangents of the outputs depend on the leaves as well."""

    def loss(*xs):
        rs = [(out * w).real for out, w in zip(fn(*xs), weights, strict=True)]
        return sum((r + r * r / 2).sum().astype(float) for r in rs)

    return loss


def _grad(scalar):
    """With respect to every leaf, complex ones as JAX has it."""
    return lambda *xs: list(jax.grad(scalar, tuple(range(len(xs))))(*xs))
